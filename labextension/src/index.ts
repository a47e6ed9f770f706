/** Wiring: which parts of Lab or Notebook 7 each part of ours is given. */
import {
  ILabShell,
  ILayoutRestorer,
  JupyterFrontEnd,
  JupyterFrontEndPlugin
} from '@jupyterlab/application';
import { ICommandPalette } from '@jupyterlab/apputils';
import { INotebookTracker } from '@jupyterlab/notebook';
import { ISettingRegistry } from '@jupyterlab/settingregistry';
import { IStatusBar } from '@jupyterlab/statusbar';
import { ITranslator, nullTranslator } from '@jupyterlab/translation';
import { Api } from './api';
import { addCommands } from './commands';
import { Notifier } from './notify';
import { SandboxPanel } from './panel';
import { SandboxStatus } from './status';
import { SandboxTracker } from './tracker';

const ID = '@backintel/sandbox:plugin';
const DOMAIN = 'backintel_sandbox';
/** After Lab's own items for the kernel and memory. */
const STATUS_RANK = 3;
/** Right of the kernel's name in Notebook 7's top area. */
const MENU_RANK = 10_020;
const PANEL_RANK = 400;

const plugin: JupyterFrontEndPlugin<void> = {
  id: ID,
  description: 'Shows what the sandbox of a notebook may do, does and made.',
  autoStart: true,
  requires: [INotebookTracker],
  optional: [
    ITranslator,
    ISettingRegistry,
    IStatusBar,
    ILabShell,
    ILayoutRestorer,
    ICommandPalette
  ],
  activate: async (
    app: JupyterFrontEnd,
    notebooks: INotebookTracker,
    translator: ITranslator | null,
    registry: ISettingRegistry | null,
    statusBar: IStatusBar | null,
    labShell: ILabShell | null,
    restorer: ILayoutRestorer | null,
    palette: ICommandPalette | null
  ): Promise<void> => {
    const trans = (translator ?? nullTranslator).load(DOMAIN);
    const { commands, serviceManager, shell } = app;
    const api = new Api(serviceManager.serverSettings);
    const tracker = new SandboxTracker(notebooks, serviceManager, api);

    const panel = new SandboxPanel({
      tracker,
      commands,
      translator: translator ?? nullTranslator,
      trans
    });
    const openPanel = (): void => {
      if (!panel.isAttached) {
        shell.add(panel, 'right', { rank: PANEL_RANK });
      }
      shell.activateById(panel.id);
    };
    addCommands(app, tracker, palette, trans, openPanel);
    shell.add(panel, 'right', { rank: PANEL_RANK });
    restorer?.add(panel, panel.id);

    const status = new SandboxStatus(tracker, trans, openPanel);
    if (statusBar) {
      statusBar.registerStatusItem(ID, {
        item: status,
        align: 'left',
        rank: STATUS_RANK,
        isActive: () => tracker.current !== null,
        activeStateChanged: tracker.changed
      });
    } else if (!labShell) {
      status.id = 'backintel-sandbox-status';
      shell.add(status, 'menu', { rank: MENU_RANK });
    }

    const settings = await registry?.load(ID).catch(() => null);
    new Notifier(tracker, commands, settings ?? null, trans);
  }
};

export default plugin;
