import { Dialog } from '@jupyterlab/apputils';
import type { TranslationBundle } from '@jupyterlab/translation';
import type { Widget } from '@lumino/widgets';

/** Show something that can be downloaded, until it is closed; true if a download was asked for. */
export async function offer(
  title: string,
  body: Widget,
  trans: TranslationBundle
): Promise<boolean> {
  const dialog = new Dialog({
    title,
    body,
    buttons: [
      Dialog.cancelButton({ label: trans.__('Close') }),
      Dialog.okButton({ label: trans.__('Download') })
    ]
  });
  dialog.addClass('jp-SandboxDialog');
  const result = await dialog.launch();
  return result.button.accept;
}
