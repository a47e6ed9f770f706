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
/** A notification stays at least this long: one that flashes tells nothing, and Lab cannot take
 * back one that it has not drawn yet. */
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
      if (event.event !== 'exported' && event.event !== 'memory') {
        this.started(model);
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
    const actions = notice.actions.map(action =>
      action === 'restart'
        ? {
            label: this.trans.__('Restart'),
            callback: () => {
              void model.restart();
            }
          }
        : {
            label: this.trans.__('Show receipt'),
            callback: () => {
              void this.commands.execute(CommandIDs.receipt, {
                kernel,
                session
              });
            }
          }
    );
    Notification.emit(notice.message, notice.type, {
      autoClose: notice.autoClose,
      actions
    });
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
  }

  private started(model: SandboxModel): void {
    const start = this.starts.get(model);
    if (start) {
      window.clearTimeout(start.timer);
      const { id } = start;
      if (id !== undefined) {
        window.setTimeout(
          () => {
            Notification.dismiss(id);
          },
          Math.max(0, start.shownAt + SHOWN_MS - Date.now())
        );
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

interface IStart {
  phase: string | null;
  timer: number;
  shownAt: number;
  id?: string;
}
