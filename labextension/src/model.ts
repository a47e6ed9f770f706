/**
 * The sandbox behind one open notebook: listens to the notebook's kernel, asks the server when it
 * is told to, and tells who watches. It asks nothing about kernels that are not ours.
 */
import { NotebookPanel } from '@jupyterlab/notebook';
import type { Kernel } from '@jupyterlab/services';
import { ISignal, Signal } from '@lumino/signaling';
import { Api, ApiError } from './api';
import {
  ISandbox,
  NO_SANDBOX,
  isLive,
  onBusy,
  onEvent,
  onMissing,
  onStatus
} from './state';
import { digestKey } from './receipts';
import type { IArtifactList, IEvent, IExport, IPlan, IReceipt } from './types';

const PROVISIONER = 'backintel-provisioner';

export class SandboxModel {
  constructor(
    readonly notebook: NotebookPanel,
    private readonly api: Api
  ) {
    const { sessionContext } = notebook;
    sessionContext.kernelChanged.connect(this.onKernel, this);
    sessionContext.statusChanged.connect(this.onKernelStatus, this);
    sessionContext.connectionStatusChanged.connect(this.onConnection, this);
    notebook.disposed.connect(() => {
      Signal.clearData(this);
    });
    this.onKernel();
  }

  /** Something that is shown has changed. */
  get changed(): ISignal<this, void> {
    return this._changed;
  }

  /** A question to the server is due: something happened that is not pushed. */
  get due(): ISignal<this, void> {
    return this._due;
  }

  /** The sandbox is gone although nobody said why: the server was restarted. */
  get vanished(): ISignal<this, void> {
    return this._vanished;
  }

  state: ISandbox = NO_SANDBOX;
  artifacts: IArtifactList | null = null;
  artifactsError: string | null = null;
  receipt: IReceipt | null = null;
  /** What a kernel would be given, while there is none. */
  plan: IPlan | null = null;
  /** Digests that the server told, by `session/name/size/mtime`. */
  readonly digests = new Map<string, string>();
  /** The server did not answer lately, or the kernel's connection broke. */
  doubtful = false;
  /** The last question to the server got no answer. */
  silent = false;

  get name(): string {
    return this.notebook.title.label;
  }

  get path(): string {
    return this.notebook.context.localPath;
  }

  /** What the server was told as the session's path: in Lab 4.6 not the notebook's, but an id. */
  get sessionPath(): string {
    return this.notebook.sessionContext.path;
  }

  /** Name of the kernel that this notebook has or asks for, if it is one of ours. */
  get kernelName(): string | null {
    const { sessionContext, model } = this.notebook;
    const name =
      sessionContext.session?.kernel?.name ??
      (sessionContext.prevKernelName ||
        sessionContext.kernelPreference.name ||
        model?.defaultKernelName);
    const spec =
      name === undefined
        ? undefined
        : sessionContext.specsManager.specs?.kernelspecs[name];
    const entry = spec?.metadata?.['kernel_provisioner'] as
      { provisioner_name?: unknown } | undefined;
    return name !== undefined && entry?.provisioner_name === PROVISIONER
      ? name
      : null;
  }

  get kernel(): Kernel.IKernelConnection | null {
    return this.notebook.sessionContext.session?.kernel ?? null;
  }

  get kernelId(): string | null {
    return this.state.kernelId;
  }

  get live(): boolean {
    return isLive(this.state);
  }

  /** Take in an event of this kernel. */
  take(event: IEvent): void {
    const before = this.state.session;
    this.silent = false;
    this.update(onEvent(this.state, event, Date.now()));
    if (this.state.session !== before) {
      this.forget();
    }
    if (event.event !== 'phase') {
      this._due.emit();
    }
  }

  /** Ask the server for the status, and for what the panel shows if `all`. */
  async refresh(all: boolean): Promise<void> {
    const kernel = this.kernelId;
    if (kernel === null) {
      await this.refreshPlan(all);
      return;
    }
    try {
      const status = await this.api.status(kernel);
      if (this.kernelId !== kernel) {
        return;
      }
      this.doubtful = false;
      this.silent = false;
      if (status.session !== this.state.session) {
        this.forget();
      }
      this.update(onStatus(this.state, status, Date.now()));
    } catch (error) {
      this.refused(kernel, error);
      return;
    }
    if (all && !document.hidden) {
      await Promise.all([
        this.refreshArtifacts(kernel),
        this.refreshReceipt(kernel)
      ]);
    }
  }

  /** Remember the digest of a content that was read. */
  noteDigest(key: string, sha256: string): void {
    this.digests.set(key, sha256);
    this._changed.emit();
  }

  /** Remember the digests of an export. */
  noteExport(done: IExport): void {
    for (const { name, sha256 } of done.artifacts) {
      const artifact = this.artifacts?.artifacts.find(
        item => item.name === name
      );
      if (artifact) {
        this.digests.set(digestKey(done.session, artifact), sha256);
      }
    }
    this._changed.emit();
  }

  /** Give the notebook a new sandbox, as its kernel's restart does. */
  async restart(): Promise<void> {
    const { sessionContext } = this.notebook;
    const { kernel, kernelName: name } = this;
    // A kernel that died may be forgotten by the server, and is after the server's own restart.
    if (this.state.stage !== 'gone' && kernel !== null) {
      try {
        // Not by the session's context, which tells nobody that it failed.
        await kernel.restart();
        return;
      } catch {
        // A new one then.
      }
    }
    if (name !== null) {
      // Else Lab would change the kernel of a session that the server does not know any more.
      await sessionContext.sessionManager.refreshRunning();
      await sessionContext.changeKernel({ name });
    }
  }

  private refused(kernel: string, error: unknown): void {
    if (this.kernelId !== kernel) {
      return;
    }
    if (!(error instanceof ApiError) || error.status !== 404) {
      // The server is away or slow: what was last known stays, and is asked for again.
      this.doubtful = true;
      this.silent = true;
      this._changed.emit();
      return;
    }
    this.doubtful = false;
    this.silent = false;
    const wasLive = this.live && this.state.status !== null;
    this.update(onMissing(this.state));
    if (wasLive) {
      this._vanished.emit();
    }
  }

  private async refreshArtifacts(kernel: string): Promise<void> {
    if (this.state.stage !== 'running') {
      return;
    }
    try {
      const list = await this.api.artifacts(kernel);
      if (this.kernelId === kernel && list.session === this.state.session) {
        this.artifacts = list;
        this.artifactsError = null;
      }
    } catch (error) {
      this.artifactsError = messageOf(error);
    }
    this._changed.emit();
  }

  private async refreshReceipt(kernel: string): Promise<void> {
    const { session } = this.state;
    try {
      const receipt = await this.api.receipt(kernel, session);
      if (this.kernelId === kernel && receipt.session === this.state.session) {
        this.receipt = receipt;
      }
    } catch {
      // There is none yet; the section says so.
      this.receipt = null;
    }
    this._changed.emit();
  }

  private async refreshPlan(wanted: boolean): Promise<void> {
    const name = this.kernelName;
    if (!wanted || name === null || this.plan?.kernel === name) {
      return;
    }
    try {
      this.plan = await this.api.plan(name);
    } catch {
      // The owner's configuration is refused: the start will say by which key.
      this.plan = null;
    }
    this._changed.emit();
  }

  private onKernel(): void {
    const { kernel } = this;
    if (kernel === null) {
      // Ended by somebody, or the server does not know it any more; the answer tells.
      this._due.emit();
      this._changed.emit();
      return;
    }
    if (this.kernelName === null) {
      this.forget();
      this.update(NO_SANDBOX);
      return;
    }
    if (kernel.id !== this.kernelId) {
      this.forget();
      this.update({ ...NO_SANDBOX, kernelId: kernel.id });
    }
    this._due.emit();
  }

  private onKernelStatus(_: unknown, status: Kernel.Status): void {
    if (status !== 'busy' && status !== 'idle') {
      return;
    }
    const before = this.state;
    this.update(onBusy(before, status === 'busy', Date.now()));
    if (before.busySince !== null && this.state.busySince === null) {
      this._due.emit();
    }
  }

  private onConnection(_: unknown, status: Kernel.ConnectionStatus): void {
    if (this.live && status !== 'connected') {
      this.doubtful = true;
      this._due.emit();
    }
  }

  private forget(): void {
    this.artifacts = null;
    this.artifactsError = null;
    this.receipt = null;
    this.digests.clear();
  }

  private update(state: ISandbox): void {
    if (state !== this.state) {
      this.state = state;
      this._changed.emit();
    }
  }

  private readonly _changed = new Signal<this, void>(this);
  private readonly _due = new Signal<this, void>(this);
  private readonly _vanished = new Signal<this, void>(this);
}

export function messageOf(error: unknown): string {
  return error instanceof Error ? error.message : String(error);
}
