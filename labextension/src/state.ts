/**
 * What is known of one notebook's sandbox, as a value: server answers, pushed events and the
 * kernel's own busy and idle messages go in, a new value comes out. Nothing here waits or asks.
 * Times of day are milliseconds of one clock that the caller reads.
 */
import type { IEnded, IEvent, IStatus } from './types';

export type Stage = 'none' | 'starting' | 'running' | 'ended' | 'gone';

export interface ISandbox {
  readonly stage: Stage;
  readonly kernelId: string | null;
  readonly session: string | null;
  /** When the start was asked for. */
  readonly startedAt: number | null;
  /** The last phase of the start that is over. */
  readonly phase: string | null;
  readonly status: IStatus | null;
  /** When `status` was received. */
  readonly statusAt: number;
  /** Since when the kernel says that it works. */
  readonly busySince: number | null;
  readonly ended: IEnded | null;
}

const MEMORY_WARNING = 0.9;

export const NO_SANDBOX: ISandbox = {
  stage: 'none',
  kernelId: null,
  session: null,
  startedAt: null,
  phase: null,
  status: null,
  statusAt: 0,
  busySince: null,
  ended: null
};

export interface ICellClock {
  readonly elapsed: number;
  readonly deadline: number | null;
  readonly paused: boolean;
}

/** The state after the server's answer. */
export function onStatus(
  state: ISandbox,
  status: IStatus,
  now: number
): ISandbox {
  const stage =
    status.state === 'ended'
      ? 'ended'
      : status.state === 'starting'
        ? 'starting'
        : 'running';
  const busy = status.state === 'busy';
  return {
    stage,
    kernelId: status.kernel_id,
    session: status.session,
    startedAt: stage === 'starting' ? (state.startedAt ?? now) : null,
    phase: status.phase,
    status,
    statusAt: now,
    busySince: busy ? (state.busySince ?? now) : null,
    ended: status.ended
  };
}

/** The state after a pushed event of this kernel. */
export function onEvent(state: ISandbox, event: IEvent, now: number): ISandbox {
  switch (event.event) {
    case 'phase':
    case 'ready': {
      const fresh =
        state.stage !== 'starting' || state.session !== event.session;
      const seconds = event.seconds ?? 0;
      return {
        ...NO_SANDBOX,
        stage: event.event === 'ready' ? 'running' : 'starting',
        kernelId: event.kernel_id,
        session: event.session,
        startedAt:
          fresh || state.startedAt === null
            ? now - seconds * 1000
            : state.startedAt,
        phase: event.phase ?? state.phase
      };
    }
    case 'failed':
    case 'ended':
      // A late word on the session before a restart changes nothing.
      if (state.stage === 'running' && state.session !== event.session) {
        return state;
      }
      return {
        ...state,
        stage: 'ended',
        kernelId: event.kernel_id,
        busySince: null,
        ended: {
          reason: event.reason ?? 'StartFailed',
          class: event.class ?? 'infrastructure',
          message: event.message ?? '',
          remedy: event.remedy ?? ''
        }
      };
    case 'memory':
      return memoryOf(state, event);
    default:
      return state;
  }
}

function memoryOf(state: ISandbox, event: IEvent): ISandbox {
  const { status } = state;
  if (!status?.memory || event.used_bytes === undefined) {
    return state;
  }
  const used = event.used_bytes;
  const peak = Math.max(used, status.memory.peak_bytes);
  return {
    ...state,
    status: {
      ...status,
      memory: {
        ...status.memory,
        used_bytes: used,
        peak_bytes: peak,
        warned: true
      }
    }
  };
}

/** The state after the kernel said that it works or that it is done. */
export function onBusy(state: ISandbox, busy: boolean, now: number): ISandbox {
  if (state.stage !== 'running' || busy === (state.busySince !== null)) {
    return state;
  }
  return { ...state, busySince: busy ? now : null };
}

/** The state after the server said that it knows no such sandbox. */
export function onMissing(state: ISandbox): ISandbox {
  return state.stage === 'running' || state.stage === 'starting'
    ? { ...state, stage: 'gone', busySince: null }
    : state;
}

/** How long the running cell has run; null if none runs. */
export function cellClock(state: ISandbox, now: number): ICellClock | null {
  const { busySince, status, statusAt } = state;
  if (state.stage !== 'running' || busySince === null || !status) {
    return null;
  }
  if (statusAt < busySince || (statusAt === busySince && !status.cell)) {
    return {
      elapsed: (now - busySince) / 1000,
      deadline: status.limits?.cell_deadline_s ?? null,
      paused: false
    };
  }
  // The server was asked since: if it names no cell, the kernel is busy with something else.
  const { cell } = status;
  return cell
    ? {
        elapsed: cell.elapsed_s + (cell.paused ? 0 : (now - statusAt) / 1000),
        deadline: cell.deadline_s,
        paused: cell.paused
      }
    : null;
}

/** Seconds until the session reaches its limit; null if that is not known. */
export function runLeft(state: ISandbox, now: number): number | null {
  const run = state.status?.run;
  return state.stage === 'running' && run
    ? Math.max(0, run.left_s - (now - state.statusAt) / 1000)
    : null;
}

/** Whether so much memory is in use that the end is near. */
export function isMemoryFull(state: ISandbox): boolean {
  const memory = state.status?.memory;
  return (
    state.stage === 'running' &&
    !!memory &&
    memory.used_bytes >= MEMORY_WARNING * memory.limit_bytes
  );
}

/** Whether the sandbox may still change by itself. */
export function isLive(state: ISandbox): boolean {
  return state.stage === 'starting' || state.stage === 'running';
}
