/** Turns contents that a guest wrote into something that can be shown and does nothing. */

export type Kind = 'image' | 'html' | 'table' | 'text';

export const MAX_ROWS = 200;
const MAX_COLUMNS = 50;
const POLICY =
  "default-src 'none'; img-src data:; style-src 'unsafe-inline'; font-src data:";

/** How an artifact is shown, by its suffix. */
export function kindOf(name: string): Kind {
  const suffix = name.slice(name.lastIndexOf('.') + 1).toLowerCase();
  if (['png', 'jpg', 'svg'].includes(suffix)) {
    return 'image';
  }
  return suffix === 'html'
    ? 'html'
    : ['csv', 'tsv'].includes(suffix)
      ? 'table'
      : 'text';
}

/** Whether the server offers a preview for an artifact of this name. */
export function hasPreview(name: string): boolean {
  return /\.(png|jpg|svg|html|csv|tsv|txt|md|json)$/i.test(name);
}

/**
 * A page for an iframe with `sandbox=""`: the policy comes before anything else of it, and nothing
 * in it leads away, for a policy does not stop a link that a person clicks.
 */
export function enclose(html: string): string {
  const page = new DOMParser().parseFromString(html, 'text/html');
  for (const element of page.querySelectorAll(
    'base, meta, link, iframe, object, embed'
  )) {
    element.remove();
  }
  for (const element of page.querySelectorAll('*')) {
    for (const name of element.getAttributeNames()) {
      const leads = /^(xlink:)?href$|^(form)?action$|^ping$|^target$/i.test(
        name
      );
      if (leads && element.getAttribute(name)?.startsWith('#') !== true) {
        element.removeAttribute(name);
      }
    }
  }
  const policy = `<meta http-equiv="Content-Security-Policy" content="${POLICY}">`;
  return `<!doctype html><meta charset="utf-8">${policy}${page.documentElement.outerHTML}`;
}

/** Rows of a CSV or TSV text, cut to what a person looks at. */
export function table(
  text: string,
  tabs: boolean
): { rows: string[][]; more: boolean } {
  const separator = tabs ? '\t' : ',';
  const rows: string[][] = [];
  let row: string[] = [];
  let cell = '';
  let quoted = false;
  const endCell = (): void => {
    if (row.length < MAX_COLUMNS) {
      row.push(cell);
    }
    cell = '';
  };
  for (let at = 0; at < text.length; at += 1) {
    const character = text[at] ?? '';
    if (quoted) {
      if (character !== '"') {
        cell += character;
      } else if (text[at + 1] === '"') {
        cell += '"';
        at += 1;
      } else {
        quoted = false;
      }
    } else if (character === '"' && cell === '') {
      quoted = true;
    } else if (character === separator) {
      endCell();
    } else if (character === '\n') {
      endCell();
      rows.push(row);
      row = [];
      if (rows.length > MAX_ROWS) {
        return { rows, more: at + 1 < text.length };
      }
    } else if (character !== '\r') {
      cell += character;
    }
  }
  if (cell !== '' || row.length > 0) {
    endCell();
    rows.push(row);
  }
  return { rows, more: false };
}
