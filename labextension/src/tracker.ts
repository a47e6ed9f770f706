/**
 * The sandboxes of all open notebooks, and which one is in front. Events are pushed by the server;
 * it is asked only for the notebook in front, only while the page is visible, and not more often
 * than every 5 s for a working and every 30 s for an idle sandbox unless something happened.
 */
import { INotebookTracker, NotebookPanel } from '@jupyterlab/notebook';
import type { ServiceManager } from '@jupyterlab/services';
import { Debouncer, Poll } from '@lumino/polling';
import { ISignal, Signal } from '@lumino/signaling';
import { Api } from './api';
import { SandboxModel } from './model';
import { EVENT_SCHEMA, IEvent } from './types';

const BUSY_MS = 5_000;
const IDLE_MS = 30_000;
const SETTLE_MS = 250;
/** The server measures memory each second: what a cell left is known after that. */
const MEASURED_MS = 1_500;

export interface IOccurrence {
  readonly model: SandboxModel;
  readonly event: IEvent;
}

export class SandboxTracker {
  constructor(
    private readonly notebooks: INotebookTracker,
    services: ServiceManager.IManager,
    readonly api: Api
  ) {
    notebooks.forEach(notebook => {
      this.add(notebook);
    });
    notebooks.widgetAdded.connect((_, notebook) => {
      this.add(notebook);
    });
    notebooks.currentChanged.connect(() => {
      this.follow();
    });
    services.events.stream.connect((_, emission) => {
      if (emission.schema_id === EVENT_SCHEMA) {
        this.dispatch(emission as unknown as IEvent);
      }
    });
    services.kernelspecs.specsChanged.connect(() => {
      this._changed.emit();
      this.soon();
    });
    document.addEventListener('visibilitychange', () => {
      if (!document.hidden && this.overdue) {
        this.soon();
      }
    });
    new Poll({
      name: '@backintel/sandbox',
      factory: () => this.refresh(),
      frequency: { interval: BUSY_MS, backoff: true, max: IDLE_MS },
      standby: () => document.hidden || !this.wanted
    });
    void services.kernelspecs.ready.then(() => {
      this.follow();
    });
  }

  /** The model of the notebook in front, or what is known of it, has changed. */
  get changed(): ISignal<this, void> {
    return this._changed;
  }

  /** An event of one of the open notebooks. */
  get occurred(): ISignal<this, IOccurrence> {
    return this._occurred;
  }

  /** A sandbox whose server was restarted. */
  get vanished(): ISignal<this, SandboxModel> {
    return this._vanished;
  }

  /** The notebook in front, if it has or asks for a kernel of ours. */
  get current(): SandboxModel | null {
    const notebook = this.notebooks.currentWidget;
    const model = notebook && this.models.get(notebook);
    return model && model.kernelName !== null ? model : null;
  }

  /** Whether artifacts and receipt are shown, and so asked for. */
  set detailed(value: boolean) {
    this._detailed = value;
    if (value) {
      this.soon();
    }
  }

  /** Ask the server now. */
  async refresh(): Promise<void> {
    const model = this.current;
    if (!model || document.hidden || this.asking) {
      return;
    }
    this.asking = true;
    this.askedAt = Date.now();
    this.overdue = false;
    try {
      await model.refresh(this._detailed);
    } finally {
      this.asking = false;
    }
    // Something happened in the meantime.
    this.again();
    if (model.doubtful) {
      throw new Error('the sandbox server did not answer');
    }
  }

  private get wanted(): boolean {
    const model = this.current;
    if (!model?.live) {
      return false;
    }
    return (
      model.doubtful ||
      model.state.busySince !== null ||
      Date.now() - this.askedAt >= IDLE_MS
    );
  }

  private add(notebook: NotebookPanel): void {
    if (this.models.has(notebook)) {
      return;
    }
    const model = new SandboxModel(notebook, this.api);
    this.models.set(notebook, model);
    notebook.disposed.connect(() => {
      this.models.delete(notebook);
    });
    model.changed.connect(() => {
      if (model === this.current) {
        this._changed.emit();
      }
    });
    model.due.connect(() => {
      if (model === this.current) {
        this.soon();
      }
    });
    model.vanished.connect(() => {
      this._vanished.emit(model);
    });
  }

  private follow(): void {
    this._changed.emit();
    this.soon();
  }

  /** Ask shortly, and once for whatever happens until then; when hidden, on return. */
  private soon(): void {
    this.overdue = true;
    if (!document.hidden) {
      void this.settled.invoke();
      void this.measured.invoke();
    }
  }

  private again(): void {
    if (this.overdue) {
      void this.settled.invoke();
    }
  }

  private dispatch(event: IEvent): void {
    const model = this.modelOf(event);
    if (model) {
      this._occurred.emit({ model, event });
      model.take(event);
    }
  }

  private modelOf(event: IEvent): SandboxModel | undefined {
    const models = [...this.models.values()];
    const known = models.find(model => model.kernelId === event.kernel_id);
    if (known || (event.event !== 'phase' && event.event !== 'failed')) {
      return known;
    }
    // A kernel that is being started has no connection here yet, but its session is known.
    return models.find(
      model =>
        model.kernelName !== null &&
        model.kernel === null &&
        model.sessionPath === event.notebook
    );
  }

  private asking = false;
  private overdue = false;
  private askedAt = 0;
  private _detailed = false;
  // Not through the poll, which asks nothing while it stands by.
  private readonly ask = (): Promise<void> =>
    this.refresh().catch(() => undefined);
  private readonly settled = new Debouncer(this.ask, SETTLE_MS);
  private readonly measured = new Debouncer(this.ask, MEASURED_MS);
  private readonly models = new Map<NotebookPanel, SandboxModel>();
  private readonly _changed = new Signal<this, void>(this);
  private readonly _occurred = new Signal<this, IOccurrence>(this);
  private readonly _vanished = new Signal<this, SandboxModel>(this);
}
