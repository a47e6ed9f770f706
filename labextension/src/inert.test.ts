import {
  MAX_ROWS,
  fateOf,
  hasPreview,
  keepsAttribute,
  kindOf,
  table
} from './inert';

it.each([
  ['plot.PNG', 'image'],
  ['a/b.svg', 'image'],
  ['report.html', 'html'],
  ['data.tsv', 'table'],
  ['notes.md', 'text']
])('shows %s as %s', (name, kind) => {
  expect(kindOf(name)).toBe(kind);
  expect(hasPreview(name)).toBe(true);
});

it.each(['data.parquet', 'png', 'a.html.zip'])(
  'offers no preview of %s',
  name => {
    expect(hasPreview(name)).toBe(false);
  }
);

describe('of a hostile page', () => {
  it.each(['base', 'meta', 'link', 'form', 'area', 'a', 'input', 'button'])(
    'the HTML element %s is not kept',
    name => {
      expect(fateOf(name, false)).toBe('unwrap');
    }
  );

  it.each(['template', 'script', 'style', 'iframe', 'object', 'math'])(
    'the HTML element %s is dropped with all in it',
    name => {
      expect(fateOf(name, false)).toBe('drop');
    }
  );

  it.each([
    'set',
    'animate',
    'animateMotion',
    'animateTransform',
    'foreignObject',
    'script',
    'style',
    'title',
    'desc'
  ])('the SVG element %s is dropped with all in it', name => {
    expect(fateOf(name, true)).toBe('drop');
  });

  it('a link of SVG leaves its text', () => {
    expect(fateOf('a', true)).toBe('unwrap');
    expect(fateOf('text', true)).toBe('keep');
  });

  it.each([
    ['img', false, 'src', 'https://evil.invalid/'],
    ['img', false, 'srcset', 'data:image/png;base64,AA=='],
    ['img', false, 'usemap', '#map'],
    ['img', false, 'onerror', 'run()'],
    ['p', false, 'src', 'data:image/png;base64,AA=='],
    ['p', false, 'href', '#top'],
    ['p', false, 'aria-<a', ''],
    ['image', true, 'xlink:href', 'https://evil.invalid/'],
    ['use', true, 'href', 'https://evil.invalid/#x'],
    ['use', true, 'href', 'data:image/svg+xml,x#x'],
    ['rect', true, 'onclick', 'run()']
  ])('%s (SVG: %s) loses %s="%s"', (element, svg, name, value) => {
    expect(keepsAttribute(element, svg, name, value)).toBe(false);
  });

  it.each([
    ['img', false, 'src', 'data:image/png;base64,AA=='],
    ['td', false, 'colspan', '2'],
    ['td', false, 'aria-label', 'x'],
    ['image', true, 'xlink:href', 'data:image/png;base64,AA=='],
    ['use', true, 'xlink:href', '#glyph'],
    ['rect', true, 'fill', 'teal']
  ])('%s (SVG: %s) keeps %s="%s"', (element, svg, name, value) => {
    expect(keepsAttribute(element, svg, name, value)).toBe(true);
  });
});

describe('a table', () => {
  it('keeps quoted separators, quotes and line ends', () => {
    const { rows } = table('a,"b,""c"""\r\n"1\n2",3\n', false);
    expect(rows).toEqual([
      ['a', 'b,"c"'],
      ['1\n2', '3']
    ]);
  });

  it('is split at tabs where it has them', () => {
    expect(table('a\tb,c', true).rows).toEqual([['a', 'b,c']]);
  });

  it('is cut, and says so', () => {
    const { rows, more } = table('x\n'.repeat(1000), false);
    expect(rows).toHaveLength(MAX_ROWS + 1);
    expect(more).toBe(true);
    expect(table('x\ny\n', false).more).toBe(false);
  });

  it('is cut in width', () => {
    const { rows } = table('x,'.repeat(10_000), false);
    expect(rows[0]?.length).toBeLessThan(100);
  });

  it('survives a quote that is never closed', () => {
    expect(table('a,"b', false).rows).toEqual([['a', 'b']]);
  });
});
