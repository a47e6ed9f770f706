/** Shows notifications: starts that take long, warnings, and the reason of each end. */
import { Notification } from '@jupyterlab/apputils';
import type { ISettingRegistry } from '@jupyterlab/settingregistry';
import type { TranslationBundle } from '@jupyterlab/translation';
import type { CommandRegistry } from '@lumino/commands';
import { CommandIDs } from './commands';
import type { SandboxModel } from './model';
import { INotice, noticeOf } from './notices';
import { isMemoryFull } from './state';
import { clip, goneText, phaseText } from './text';
import type { SandboxTracker } from './tracker';

/** A start that is quicker needs no words. */
const PATIENCE_MS = 2_000;
/** A notification stays as it is at least this long: one that flashes tells nothing, and Lab can
 * neither change nor take back one that it has not drawn yet. */
const SHOWN_MS = 1_500;

export class Notifier {
  constructor(
    private readonly tracker: SandboxTracker,
    private readonly commands: CommandRegistry,
    private readonly settings: ISettingRegistry.ISettings | null,
    private readonly trans: TranslationBundle
  ) {
    tracker.occurred.connect((_, { model, event }) => {
      if (event.event === 'phase') {
        this.progress(model, event.phase ?? null, event.seconds ?? 0);
        return;
      }
      if (event.event === 'memory' && !this.warns(event.session)) {
        return;
      }
      const limits = model.state.status?.limits ?? null;
      const notice = noticeOf(event, limits, this.named(model), trans);
      if (notice) {
        this.show(notice, model, event.session);
      }
    });
    tracker.changed.connect(() => {
      this.look();
    });
    tracker.vanished.connect((_, model) => {
      const name = this.named(model);
      const text = goneText(trans);
      this.show(
        {
          message: clip(name === null ? text : `${name}: ${text}`),
          type: 'error',
          autoClose: false,
          actions: ['restart']
        },
        model,
        null
      );
    });
  }

  /** Warn by the figures too: the event may have come before this page was opened. */
  private look(): void {
    const model = this.tracker.current;
    if (!model || !isMemoryFull(model.state)) {
      return;
    }
    const { kernelId, session, status } = model.state;
    const notice = noticeOf(
      {
        event: 'memory',
        kernel_id: kernelId ?? '',
        session,
        used_bytes: status?.memory?.used_bytes ?? 0,
        limit_bytes: status?.memory?.limit_bytes ?? 0
      },
      null,
      null,
      this.trans
    );
    if (notice && this.warns(session)) {
      this.show(notice, model, session);
    }
  }

  /** Whether a warning of memory is wanted and was not given yet in this session. */
  private warns(session: string | null): boolean {
    if (!this.enabled('memoryWarning') || this.warned.has(session)) {
      return false;
    }
    this.warned.add(session);
    return true;
  }

  private show(
    notice: INotice,
    model: SandboxModel,
    session: string | null
  ): void {
    const kernel = model.kernelId;
    // By whoever: the kernel's own restart comes by itself, and must not be ended by an old notice.
    const replaced = (): boolean =>
      model.live && model.state.session !== session;
    const restart: Notification.IAction = {
      label: this.trans.__('Restart'),
      callback: () => {
        if (replaced()) {
          Notification.info(this.trans.__('A new sandbox is already there.'));
        } else {
          void model.restart();
        }
      }
    };
    const receipt: Notification.IAction = {
      label: this.trans.__('Show receipt'),
      callback: event => {
        // Else Lab would take the notification away, and its other offer with it.
        event.preventDefault();
        void this.commands.execute(CommandIDs.receipt, { kernel, session });
      }
    };
    const offered = { restart, receipt };
    const actions = notice.actions.map(action => offered[action]);
    const id = Notification.emit(notice.message, notice.type, {
      autoClose: notice.autoClose,
      actions
    });
    const shownAt = Date.now();
    if (notice.until === 'end') {
      when(
        model,
        () => !model.live || replaced(),
        () => {
          later(shownAt, () => {
            Notification.dismiss(id);
          });
        }
      );
    } else if (actions.includes(restart)) {
      when(model, replaced, () => {
        later(shownAt, () => {
          const left = actions.filter(action => action !== restart);
          Notification.update({ id, actions: left });
        });
      });
    }
  }

  private progress(
    model: SandboxModel,
    phase: string | null,
    seconds: number
  ): void {
    if (!this.enabled('startProgress')) {
      return;
    }
    const known = this.starts.get(model);
    if (known?.id !== undefined) {
      Notification.update({ id: known.id, message: this.startText(phase) });
      known.phase = phase;
      return;
    }
    if (known) {
      known.phase = phase;
      return;
    }
    const start: IStart = {
      phase,
      shownAt: 0,
      timer: window.setTimeout(
        () => {
          // As good as over.
          if (start.phase === 'ready') {
            return;
          }
          start.shownAt = Date.now();
          start.id = Notification.emit(
            this.startText(start.phase),
            'in-progress',
            { autoClose: false }
          );
        },
        Math.max(0, PATIENCE_MS - seconds * 1000)
      )
    };
    this.starts.set(model, start);
    model.notebook.disposed.connect(() => {
      this.started(model);
    });
    // Also without a word of the server, which may be gone.
    when(
      model,
      () => model.state.stage !== 'starting' || model.silent,
      () => {
        this.started(model);
      }
    );
  }

  private started(model: SandboxModel): void {
    const start = this.starts.get(model);
    if (start) {
      window.clearTimeout(start.timer);
      const { id } = start;
      if (id !== undefined) {
        later(start.shownAt, () => {
          Notification.dismiss(id);
        });
      }
      this.starts.delete(model);
    }
  }

  private startText(phase: string | null): string {
    return this.trans.__(
      'The sandbox is starting: %1…',
      phaseText(phase, this.trans)
    );
  }

  private named(model: SandboxModel): string | null {
    return model === this.tracker.current ? null : model.name;
  }

  private enabled(name: 'memoryWarning' | 'startProgress'): boolean {
    return this.settings?.get(name).composite !== false;
  }

  private readonly warned = new Set<string | null>();
  private readonly starts = new Map<SandboxModel, IStart>();
}

/** Do something once, at the first change of a sandbox after which it is so. */
function when(model: SandboxModel, so: () => boolean, act: () => void): void {
  const look = (): void => {
    if (so()) {
      model.changed.disconnect(look);
      act();
    }
  };
  model.changed.connect(look);
}

/** Do something to a notification that is shown since then. */
function later(shownAt: number, act: () => void): void {
  window.setTimeout(act, Math.max(0, shownAt + SHOWN_MS - Date.now()));
}

interface IStart {
  phase: string | null;
  timer: number;
  shownAt: number;
  id?: string;
}
