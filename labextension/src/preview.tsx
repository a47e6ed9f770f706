/**
 * Shows one artifact without trusting it: pictures as `img`, whose scripts never run; HTML in an
 * iframe with neither scripts nor an origin nor a network; everything else as text.
 */
import { ReactWidget } from '@jupyterlab/apputils';
import type { TranslationBundle } from '@jupyterlab/translation';
import * as React from 'react';
import type { IContent } from './api';
import { offer } from './dialog';
import { MAX_ROWS, enclose, kindOf, table } from './inert';

/** Show the artifact until the person closes it; true if a download was asked for. */
export async function preview(
  name: string,
  content: IContent,
  trans: TranslationBundle
): Promise<boolean> {
  const kind = kindOf(name);
  const text = kind === 'image' ? '' : await content.blob.text();
  const url = kind === 'image' ? URL.createObjectURL(content.blob) : '';
  const body = ReactWidget.create(
    <div className="jp-SandboxPreview">
      {kind === 'image' ? <img src={url} alt={name} /> : null}
      {kind === 'html' ? (
        <>
          <p>{trans.__('Scripts and links are off in this preview.')}</p>
          <iframe sandbox="" srcDoc={enclose(text)} title={name} />
        </>
      ) : null}
      {kind === 'table' ? (
        <Table text={text} name={name} trans={trans} />
      ) : null}
      {kind === 'text' ? <pre tabIndex={0}>{text}</pre> : null}
      {content.sha256 === null ? null : (
        <p className="jp-SandboxPreview-digest">sha256 {content.sha256}</p>
      )}
    </div>
  );
  try {
    return await offer(name, body, trans);
  } finally {
    URL.revokeObjectURL(url);
  }
}

function Table(props: {
  text: string;
  name: string;
  trans: TranslationBundle;
}): React.JSX.Element {
  const { rows, more } = table(props.text, props.name.endsWith('.tsv'));
  const [head = [], ...rest] = rows;
  return (
    <div
      className="jp-SandboxPreview-table jp-RenderedHTMLCommon"
      tabIndex={0}
      role="region"
      aria-label={props.name}
    >
      <table>
        <thead>
          <tr>
            {head.map((cell, index) => (
              <th key={index} scope="col">
                {cell}
              </th>
            ))}
          </tr>
        </thead>
        <tbody>
          {rest.map((row, index) => (
            <tr key={index}>
              {row.map((cell, column) => (
                <td key={column}>{cell}</td>
              ))}
            </tr>
          ))}
        </tbody>
      </table>
      {more ? (
        <p>{props.trans.__('The first %1 rows are shown.', MAX_ROWS)}</p>
      ) : null}
    </div>
  );
}
