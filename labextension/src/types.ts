/**
 * What the server says: the shapes of `kernel_provisioner/lab/openapi.yaml` and of its events.
 * Sizes are in bytes, times in seconds.
 */

export interface ILimits {
  name: string;
  ram_bytes: number;
  cpus: number;
  workspace_bytes: number;
  artifacts_bytes: number;
  temp_bytes: number;
  cell_deadline_s: number;
  run_deadline_s: number;
  cells: number | null;
  on_cell_deadline: 'interrupt' | 'cancel';
  grace_s: number;
  tasks: number;
  open_files: number;
}

export interface ISource {
  name: string;
  path: string;
  kind: string;
  guest_path: string;
}

/** A service that the kernel may reach; `stated`: which one answers is the owner's word. */
export interface IEndpoint {
  name: string;
  kind: 'tcp';
  host: string;
  port: number;
  identity: 'stated';
}

export interface IPlan {
  kernel: string;
  isolation: string;
  limits: ILimits;
  sources: ISource[];
  endpoints: IEndpoint[];
}

export interface IEnded {
  reason: string;
  class: 'done' | 'user' | 'limit' | 'infrastructure';
  message: string;
  remedy: string;
}

export interface IStatus {
  kernel_id: string;
  session: string | null;
  previous: string | null;
  state: 'starting' | 'idle' | 'busy' | 'ended';
  engine: string | null;
  isolation: string | null;
  profile: string | null;
  limits: ILimits | null;
  sources: ISource[];
  endpoints: IEndpoint[];
  phase: string | null;
  memory: {
    used_bytes: number;
    limit_bytes: number;
    peak_bytes: number;
    warned: boolean;
  } | null;
  cell: {
    msg_id: string;
    elapsed_s: number;
    deadline_s: number | null;
    paused: boolean;
  } | null;
  run: { left_s: number; deadline_s: number } | null;
  cells: { count: number; limit: number | null } | null;
  ended: IEnded | null;
}

export interface IArtifact {
  name: string;
  size: number;
  mtime: number;
  refused: string | null;
}

export interface IArtifactList {
  session: string;
  artifacts: IArtifact[];
  truncated: boolean;
  bytes: number;
  limit_bytes: number;
}

export interface IExport {
  session: string;
  directory: string;
  artifacts: { name: string; size: number; sha256: string }[];
  frozen_s: number;
}

export interface IReceipt {
  session: string;
  peak_memory_bytes?: number | null;
  cpu_seconds?: number | null;
  image?: { id: string } | null;
  ended: { reason: string; message: string } | null;
}

export const EVENT_SCHEMA = 'https://backintel-sandbox.invalid/events/session';

/** An event as it is pushed; `event` says which of the other members are there. */
export interface IEvent {
  event:
    'phase' | 'ready' | 'failed' | 'deadline' | 'memory' | 'ended' | 'exported';
  kernel_id: string;
  session: string | null;
  notebook?: string | null;
  phase?: string;
  seconds?: number;
  used_bytes?: number;
  limit_bytes?: number;
  reason?: string;
  class?: IEnded['class'];
  message?: string;
  remedy?: string;
}
