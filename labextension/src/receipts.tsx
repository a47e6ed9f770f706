/** The receipt as a dialog, and how digests are remembered. */
import { Dialog, ReactWidget, showDialog } from '@jupyterlab/apputils';
import type { TranslationBundle } from '@jupyterlab/translation';
import * as React from 'react';
import type { IArtifact, IReceipt } from './types';

/** Under which key the digest of an artifact is kept: another size or time is another content. */
export function digestKey(session: string, artifact: IArtifact): string {
  return [session, artifact.name, artifact.size, artifact.mtime].join('/');
}

/** Show a receipt as it is; true if a download was asked for. */
export async function showReceipt(
  receipt: IReceipt,
  trans: TranslationBundle
): Promise<boolean> {
  const result = await showDialog({
    title: trans.__('Receipt of session %1', receipt.session),
    body: ReactWidget.create(
      <pre className="jp-SandboxReceipt" tabIndex={0}>
        {JSON.stringify(receipt, null, 2)}
      </pre>
    ),
    buttons: [
      Dialog.cancelButton({ label: trans.__('Close') }),
      Dialog.okButton({ label: trans.__('Download') })
    ]
  });
  return result.button.accept;
}
