import { MAX_ROWS, hasPreview, kindOf, table } from './inert';

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
