/** The commands of the palette, the panel and the notifications. */
import type { JupyterFrontEnd } from '@jupyterlab/application';
import {
  ICommandPalette,
  InputDialog,
  Notification,
  showErrorMessage
} from '@jupyterlab/apputils';
import { PathExt } from '@jupyterlab/coreutils';
import type { TranslationBundle } from '@jupyterlab/translation';
import {
  downloadIcon,
  listIcon,
  refreshIcon,
  saveIcon
} from '@jupyterlab/ui-components';
import type { IContent } from './api';
import { sandboxIcon } from './icon';
import { SandboxModel, messageOf } from './model';
import { preview } from './preview';
import { digestKey, showReceipt } from './receipts';
import type { SandboxTracker } from './tracker';

export const CommandIDs = {
  open: 'backintel:open-panel',
  refresh: 'backintel:refresh',
  exportAll: 'backintel:export-artifacts',
  receipt: 'backintel:show-receipt',
  preview: 'backintel:preview-artifact',
  download: 'backintel:download-artifact'
} as const;

const DONE_MS = 10_000;

export function addCommands(
  app: JupyterFrontEnd,
  tracker: SandboxTracker,
  palette: ICommandPalette | null,
  trans: TranslationBundle,
  openPanel: () => void
): void {
  const { commands } = app;
  const running = (): SandboxModel | null =>
    tracker.current?.state.stage === 'running' ? tracker.current : null;
  const failed = (title: string, error: unknown): Promise<void> =>
    showErrorMessage(title, messageOf(error));

  const fetchArtifact = async (
    model: SandboxModel,
    name: string,
    shown: boolean
  ): Promise<IContent> => {
    const content = await tracker.api.artifact(
      model.kernelId ?? '',
      name,
      shown
    );
    const list = model.artifacts;
    const artifact = list?.artifacts.find(item => item.name === name);
    if (list && artifact && content.sha256 !== null) {
      model.noteDigest(digestKey(list.session, artifact), content.sha256);
    }
    return content;
  };
  const download = async (model: SandboxModel, name: string): Promise<void> => {
    const { blob } = await fetchArtifact(model, name, false);
    save(blob, PathExt.basename(name));
  };

  commands.addCommand(CommandIDs.open, {
    label: trans.__('Show Sandbox Panel'),
    icon: sandboxIcon,
    execute: openPanel
  });
  commands.addCommand(CommandIDs.refresh, {
    label: trans.__('Refresh Artifacts'),
    caption: trans.__('Look again'),
    icon: refreshIcon,
    isEnabled: () => running() !== null,
    execute: () => tracker.refresh().catch(() => undefined)
  });
  commands.addCommand(CommandIDs.exportAll, {
    label: trans.__('Export All Artifacts…'),
    caption: trans.__('Save all artifacts into the file browser'),
    icon: saveIcon,
    isEnabled: () => running() !== null,
    execute: async () => {
      const model = running();
      if (model) {
        await exportAll(app, tracker, model, trans);
      }
    }
  });
  commands.addCommand(CommandIDs.receipt, {
    label: trans.__('Show Receipt'),
    caption: trans.__('What was asked, what held, what came out'),
    icon: listIcon,
    isEnabled: () => (tracker.current?.kernelId ?? null) !== null,
    execute: async args => {
      const kernel = args['kernel'] ?? tracker.current?.kernelId;
      const session = args['session'] ?? tracker.current?.state.session;
      try {
        const receipt = await tracker.api.receipt(
          textOf(kernel),
          typeof session === 'string' ? session : null
        );
        if (await showReceipt(receipt, trans)) {
          const text = `${JSON.stringify(receipt, null, 1)}\n`;
          save(
            new Blob([text], { type: 'application/json' }),
            `receipt-${receipt.session}.json`
          );
        }
      } catch (error) {
        await failed(trans.__('There is no receipt'), error);
      }
    }
  });
  commands.addCommand(CommandIDs.preview, {
    label: trans.__('Preview Artifact'),
    execute: async args => {
      const model = running();
      const name = textOf(args['name']);
      if (!model) {
        return;
      }
      try {
        const content = await fetchArtifact(model, name, true);
        if (await preview(name, content, trans)) {
          await download(model, name);
        }
      } catch (error) {
        await failed(trans.__('No preview of %1', name), error);
      }
    }
  });
  commands.addCommand(CommandIDs.download, {
    label: trans.__('Download Artifact'),
    icon: downloadIcon,
    execute: async args => {
      const model = running();
      const name = textOf(args['name']);
      try {
        if (model) {
          await download(model, name);
        }
      } catch (error) {
        await failed(trans.__('%1 was not downloaded', name), error);
      }
    }
  });

  tracker.changed.connect(() => {
    for (const id of [
      CommandIDs.refresh,
      CommandIDs.exportAll,
      CommandIDs.receipt
    ]) {
      commands.notifyCommandChanged(id);
    }
  });
  for (const command of [
    CommandIDs.open,
    CommandIDs.exportAll,
    CommandIDs.receipt
  ]) {
    palette?.addItem({ command, category: trans.__('Sandbox') });
  }
}

async function exportAll(
  app: JupyterFrontEnd,
  tracker: SandboxTracker,
  model: SandboxModel,
  trans: TranslationBundle
): Promise<void> {
  const name = PathExt.basename(model.path, PathExt.extname(model.path));
  const folder = PathExt.join(PathExt.dirname(model.path), `${name}-artifacts`);
  const answer = await InputDialog.getText({
    title: trans.__('Export all artifacts'),
    label: trans.__('New folder'),
    text: folder,
    okLabel: trans.__('Export')
  });
  if (!answer.button.accept || !answer.value) {
    return;
  }
  try {
    const done = await tracker.api.exportAll(
      model.kernelId ?? '',
      answer.value
    );
    model.noteExport(done);
    const show = 'filebrowser:go-to-path';
    const canShow = app.commands.hasCommand(show);
    Notification.success(
      trans._n(
        '%1 file was exported to %2.',
        '%1 files were exported to %2.',
        done.artifacts.length,
        done.directory
      ),
      {
        autoClose: DONE_MS,
        actions: canShow
          ? [
              {
                label: trans.__('Show'),
                callback: () => {
                  void app.commands.execute(show, {
                    path: `/${done.directory}`
                  });
                }
              }
            ]
          : []
      }
    );
  } catch (error) {
    await showErrorMessage(trans.__('Nothing was exported'), messageOf(error));
  }
}

function save(blob: Blob, name: string): void {
  const url = URL.createObjectURL(blob);
  const link = document.createElement('a');
  link.href = url;
  link.download = name;
  document.body.append(link);
  link.click();
  link.remove();
  URL.revokeObjectURL(url);
}

function textOf(value: unknown): string {
  return typeof value === 'string' ? value : '';
}
