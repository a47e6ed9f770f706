/** Turns contents that a guest wrote into something that can be shown and does nothing. */

export type Kind = 'image' | 'html' | 'table' | 'text';

export const MAX_ROWS = 200;
const MAX_COLUMNS = 50;
const POLICY =
  "default-src 'none'; img-src data:; style-src 'unsafe-inline'; font-src data:";
const HTML_NAMESPACE = 'http://www.w3.org/1999/xhtml';
const SVG_NAMESPACE = 'http://www.w3.org/2000/svg';

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

/** What only lays out a text: no element of these leads anywhere, loads or runs anything. */
const HTML = words(`
  abbr address article aside b bdi bdo big blockquote br caption center cite code col colgroup dd
  del details dfn div dl dt em figcaption figure font footer h1 h2 h3 h4 h5 h6 header hgroup hr i
  img ins kbd li main mark meter nav ol p pre progress q rp rt ruby s samp section small span
  strike strong sub summary sup table tbody td tfoot th thead time tr tt u ul var wbr`);
/** Of other HTML elements the contents are kept, but not of these: they are no text to read. */
const HTML_UNREAD = words(`
  applet audio canvas datalist embed frame frameset head iframe math noembed noframes noscript
  object option plaintext script select style template textarea title video xmp`);
/** Shapes and text. Without what animates: that can change what was looked at here. */
const SVG = words(`
  circle clipPath defs ellipse g image line linearGradient marker mask path pattern polygon
  polyline radialGradient rect stop svg symbol text textPath tspan use`);
const HTML_ATTRIBUTES = words(`
  align alt bgcolor border cellpadding cellspacing class color colspan dir face headers height
  hidden high id lang low max min open optimum reversed role rowspan scope size span start style
  title type valign value width`);
const SVG_ATTRIBUTES = words(`
  class clip-path clip-rule clipPathUnits cx cy d dominant-baseline dx dy fill fill-opacity
  fill-rule font-family font-size font-style font-weight fx fy gradientTransform gradientUnits
  height id letter-spacing marker-end marker-mid marker-start markerHeight markerUnits markerWidth
  mask maskContentUnits maskUnits offset opacity orient overflow patternContentUnits
  patternTransform patternUnits points preserveAspectRatio r refX refY rotate rx ry
  shape-rendering spreadMethod startOffset stop-color stop-opacity stroke stroke-dasharray
  stroke-dashoffset stroke-linecap stroke-linejoin stroke-miterlimit stroke-opacity stroke-width
  style text-anchor textLength transform vector-effect viewBox visibility width x x1 x2 xml:space
  y y1 y2`);

function words(list: string): ReadonlySet<string> {
  return new Set(list.trim().split(/\s+/));
}

/** What becomes of an element of a page: only its contents may stay, or nothing of it. */
export function fateOf(name: string, svg: boolean): 'keep' | 'unwrap' | 'drop' {
  if (svg) {
    return SVG.has(name) ? 'keep' : name === 'a' ? 'unwrap' : 'drop';
  }
  return HTML.has(name) ? 'keep' : HTML_UNREAD.has(name) ? 'drop' : 'unwrap';
}

/** Whether an attribute of an element that stays does. */
export function keepsAttribute(
  element: string,
  svg: boolean,
  name: string,
  value: string
): boolean {
  if (name === (svg ? 'href' : 'src') || (svg && name === 'xlink:href')) {
    return element === 'img' || element === 'image'
      ? /^data:image\//i.test(value)
      : svg && value.startsWith('#');
  }
  return svg
    ? SVG_ATTRIBUTES.has(name)
    : HTML_ATTRIBUTES.has(name) || /^aria-[a-z]+$/.test(name);
}

/**
 * A page for an iframe with `sandbox=""`: the policy comes before anything else of it, and nothing
 * in it leads away, for a policy does not stop a link that a person clicks.
 *
 * It is written anew, of what is known to be harmless. Apart from the style sheets, which come
 * first, nothing of it is raw text, so it cannot turn into something else when it is read again.
 */
export function enclose(html: string): string {
  const page = new DOMParser().parseFromString(html, 'text/html');
  const made = document.implementation.createHTMLDocument('');
  for (const sheet of page.querySelectorAll('style')) {
    // What SVG calls so may hold elements.
    if (sheet.namespaceURI === HTML_NAMESPACE) {
      const style = made.createElement('style');
      style.textContent = sheet.textContent;
      style.media = sheet.media;
      made.head.append(style);
    }
  }
  copyAttributes(page.documentElement, made.documentElement);
  copyAttributes(page.body, made.body);
  copyContents(page.body, made.body);
  const policy = `<meta http-equiv="Content-Security-Policy" content="${POLICY}">`;
  return `<!doctype html><meta charset="utf-8">${policy}${made.documentElement.outerHTML}`;
}

function copyContents(from: Element, to: Element): void {
  const made = to.ownerDocument;
  for (const node of from.childNodes) {
    if (node instanceof Text) {
      to.append(made.createTextNode(node.data));
    } else if (node instanceof Element) {
      const { localName, namespaceURI } = node;
      const svg = namespaceURI === SVG_NAMESPACE;
      const known = svg || namespaceURI === HTML_NAMESPACE;
      const fate = known ? fateOf(localName, svg) : 'drop';
      if (fate === 'unwrap') {
        copyContents(node, to);
      } else if (fate === 'keep') {
        const copy = made.createElementNS(namespaceURI, localName);
        copyAttributes(node, copy);
        copyContents(node, copy);
        to.append(copy);
      }
    }
  }
}

function copyAttributes(from: Element, to: Element): void {
  const svg = from.namespaceURI === SVG_NAMESPACE;
  for (const { name, namespaceURI, value } of from.attributes) {
    if (keepsAttribute(from.localName, svg, name, value)) {
      to.setAttributeNS(namespaceURI, name, value);
    }
  }
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
