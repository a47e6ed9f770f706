import {
  NO_SANDBOX,
  ISandbox,
  cellClock,
  isLive,
  isMemoryFull,
  onBusy,
  onEvent,
  onMissing,
  onStatus,
  runLeft
} from './state';
import type { IEvent, IStatus } from './types';

const STATUS: IStatus = {
  kernel_id: 'k',
  session: 's1',
  previous: null,
  state: 'idle',
  engine: 'bwrap',
  isolation: 'namespaces: weaker isolation',
  profile: 'interactive',
  limits: null,
  sources: [],
  endpoints: [],
  phase: 'ready',
  memory: {
    used_bytes: 100,
    limit_bytes: 1000,
    peak_bytes: 200,
    warned: false
  },
  cell: null,
  run: { left_s: 100, deadline_s: 120 },
  cells: { count: 1, limit: null },
  ended: null
};
const BUSY: IStatus = {
  ...STATUS,
  state: 'busy',
  cell: { msg_id: 'm', elapsed_s: 5, deadline_s: 120, paused: false }
};

function event(name: IEvent['event'], more: Partial<IEvent> = {}): IEvent {
  return { event: name, kernel_id: 'k', session: 's1', ...more };
}

function running(status = STATUS, now = 1000): ISandbox {
  return onStatus(NO_SANDBOX, status, now);
}

describe('a start', () => {
  it('begins with its first phase, counted from when it was asked for', () => {
    const state = onEvent(
      NO_SANDBOX,
      event('phase', { phase: 'supervisor', seconds: 0.5 }),
      10_000
    );
    expect(state).toMatchObject({
      stage: 'starting',
      kernelId: 'k',
      session: 's1',
      phase: 'supervisor',
      startedAt: 9500
    });
  });

  it('keeps its beginning over its phases', () => {
    let state = onEvent(NO_SANDBOX, event('phase', { seconds: 0 }), 1000);
    state = onEvent(
      state,
      event('phase', { phase: 'kernel', seconds: 9 }),
      3000
    );
    expect(state.startedAt).toBe(1000);
    expect(state.phase).toBe('kernel');
  });

  it('is over when the kernel is ready', () => {
    const state = onEvent(NO_SANDBOX, event('ready'), 1000);
    expect(state.stage).toBe('running');
  });

  it('that failed says why', () => {
    const state = onEvent(
      NO_SANDBOX,
      event('failed', { message: 'No image.', remedy: 'Prepare one.' }),
      1000
    );
    expect(state.stage).toBe('ended');
    expect(state.ended).toMatchObject({
      reason: 'StartFailed',
      message: 'No image.'
    });
  });

  it('of a restart forgets what was known of the session before', () => {
    const ended = onEvent(running(), event('ended', { reason: 'X' }), 2000);
    const state = onEvent(ended, event('phase', { session: 's2' }), 3000);
    expect(state).toMatchObject({
      stage: 'starting',
      session: 's2',
      status: null,
      ended: null
    });
  });
});

describe('an end', () => {
  it('keeps the last figures and the reason', () => {
    const state = onEvent(
      running(BUSY),
      event('ended', { reason: 'OutOfMemory', class: 'limit', message: 'm' }),
      2000
    );
    expect(state.stage).toBe('ended');
    expect(state.status).toBe(BUSY);
    expect(state.busySince).toBeNull();
    expect(state.ended).toEqual({
      reason: 'OutOfMemory',
      class: 'limit',
      message: 'm',
      remedy: ''
    });
  });

  it('of the session before a restart does not end the new one', () => {
    const state = running({ ...STATUS, session: 's2' });
    expect(onEvent(state, event('ended', { session: 's1' }), 2000)).toBe(state);
  });

  it('that nobody announced is told from one that was', () => {
    expect(onMissing(running()).stage).toBe('gone');
    const ended = onEvent(running(), event('ended'), 2000);
    expect(onMissing(ended)).toBe(ended);
    expect(onMissing(NO_SANDBOX)).toBe(NO_SANDBOX);
  });

  it('by a status carries its reason', () => {
    const end = {
      reason: 'Shutdown',
      class: 'done' as const,
      message: 'm',
      remedy: ''
    };
    const state = running({ ...STATUS, state: 'ended', ended: end });
    expect(state.stage).toBe('ended');
    expect(state.ended).toBe(end);
    expect(isLive(state)).toBe(false);
  });
});

describe("a cell's clock", () => {
  it('stands while nothing runs', () => {
    expect(cellClock(running(), 5000)).toBeNull();
  });

  it('goes on from what the server said', () => {
    expect(cellClock(running(BUSY, 1000), 4000)).toEqual({
      elapsed: 8,
      deadline: 120,
      paused: false
    });
  });

  it('stands while the cell waits for input', () => {
    const cell = {
      msg_id: 'm',
      elapsed_s: 5,
      deadline_s: null,
      paused: true
    };
    expect(cellClock(running({ ...BUSY, cell }), 9000)?.elapsed).toBe(5);
  });

  it("starts with the kernel's own word, before the server is asked", () => {
    const state = onBusy(running(), true, 2000);
    expect(cellClock(state, 3500)).toEqual({
      elapsed: 1.5,
      deadline: null,
      paused: false
    });
  });

  it('ends with it', () => {
    const state = onBusy(running(BUSY), false, 2000);
    expect(cellClock(state, 2000)).toBeNull();
  });

  it('says nothing where the kernel works but no cell runs', () => {
    let state = onBusy(running(), true, 2000);
    state = onStatus(state, { ...STATUS, state: 'busy' }, 2500);
    expect(cellClock(state, 3000)).toBeNull();
  });
});

describe('busy and idle', () => {
  it('are taken once each', () => {
    const state = onBusy(running(), true, 2000);
    expect(onBusy(state, true, 3000)).toBe(state);
    expect(state.busySince).toBe(2000);
  });

  it('mean nothing to a sandbox that does not run', () => {
    expect(onBusy(NO_SANDBOX, true, 2000)).toBe(NO_SANDBOX);
  });
});

it('counts the time left down, and not below zero', () => {
  expect(runLeft(running(STATUS, 1000), 11_000)).toBe(90);
  expect(runLeft(running(STATUS, 1000), 999_000)).toBe(0);
  expect(runLeft(NO_SANDBOX, 0)).toBeNull();
});

it.each([
  [899, false],
  [900, true]
])('calls %d of 1000 bytes full: %s', (used_bytes, full) => {
  const memory = {
    used_bytes,
    limit_bytes: 1000,
    peak_bytes: 900,
    warned: false
  };
  expect(isMemoryFull(running({ ...STATUS, memory }))).toBe(full);
  expect(isMemoryFull(NO_SANDBOX)).toBe(false);
});

it('takes memory from its warning', () => {
  const state = onEvent(
    running(),
    event('memory', { used_bytes: 950, limit_bytes: 1000 }),
    2000
  );
  expect(state.status?.memory).toEqual({
    used_bytes: 950,
    limit_bytes: 1000,
    peak_bytes: 950,
    warned: true
  });
});
