/** The receipt as a dialog, and how digests are remembered. */
import { ReactWidget } from '@jupyterlab/apputils';
import type { TranslationBundle } from '@jupyterlab/translation';
import * as React from 'react';
import { offer } from './dialog';
import type { IArtifact, IReceipt } from './types';

/** Under which key the digest of an artifact is kept: another size or time is another content. */
export function digestKey(session: string, artifact: IArtifact): string {
  return [session, artifact.name, artifact.size, artifact.mtime].join('/');
}

/** Show a receipt as it is; true if a download was asked for. */
export function showReceipt(
  receipt: IReceipt,
  trans: TranslationBundle
): Promise<boolean> {
  const body = ReactWidget.create(
    <pre className="jp-SandboxReceipt" tabIndex={0}>
      {JSON.stringify(receipt, null, 2)}
    </pre>
  );
  return offer(trans.__('Receipt of session %1', receipt.session), body, trans);
}
