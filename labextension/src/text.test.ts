import type { TranslationBundle } from '@jupyterlab/translation';
import { noticeOf } from './notices';
import {
  NOTICE_LENGTH,
  bytes,
  clip,
  duration,
  endText,
  isolationText,
  share
} from './text';
import type { IEvent, ILimits } from './types';

// Lab's own translator without a language does the same; it is no module that Node can load.
const trans = {
  __: (text: string, ...values: (string | number)[]) =>
    text.replace(/%(\d)/g, (_, at: string) => String(values[Number(at) - 1]))
} as TranslationBundle;
const LIMITS = {
  ram_bytes: 2 * 1024 ** 3,
  cell_deadline_s: 120,
  run_deadline_s: 28_800
} as ILimits;

it.each([
  [0, '0 B'],
  [1023, '1023 B'],
  [1024, '1 KiB'],
  [1536, '1.5 KiB'],
  [10.4 * 1024, '10 KiB'],
  [1023.9 * 1024, '1 MiB'],
  [2 * 1024 ** 3, '2 GiB'],
  [5000 * 1024 ** 4, '5000 TiB']
])('says %d bytes as %s', (value, text) => {
  expect(bytes(value)).toBe(text);
});

it.each([
  [512 * 1024 ** 2, 2 * 1024 ** 3, '512 MiB / 2 GiB'],
  [1.25 * 1024 ** 3, 2 * 1024 ** 3, '1.3 / 2 GiB']
])('says %d of %d as %s', (used, limit, text) => {
  expect(share(used, limit)).toBe(text);
});

it.each([
  [-3, '0 s'],
  [59.9, '59 s'],
  [60, '1 min'],
  [185, '3 min 5 s'],
  [3600, '1 h'],
  [28_799, '7 h 59 min']
])('says %d seconds as %s', (value, text) => {
  expect(duration(value)).toBe(text);
});

it('cuts a long text at a word, and no short one', () => {
  expect(clip(' a  short\ntext ')).toBe('a short text');
  const long = clip('word '.repeat(60));
  expect(long.length).toBeLessThanOrEqual(NOTICE_LENGTH);
  expect(long).toMatch(/word…$/);
  expect(clip('x'.repeat(300))).toHaveLength(NOTICE_LENGTH);
});

it.each([
  ['namespaces: weaker isolation', 'Weaker isolation (namespaces)'],
  ['microVM', 'microVM']
])('says the isolation %s as %s', (isolation, text) => {
  expect(isolationText(isolation, trans)).toBe(text);
});

const REASONS = [
  'Shutdown',
  'ClientGone',
  'CellDeadlineExceeded',
  'RunDeadlineExceeded',
  'OutOfMemory',
  'OutputLimitExceeded',
  'KernelCrashed',
  'GuestLost',
  'EngineFailed',
  'ImageInvalid'
];

it.each(REASONS)('has a text for %s that a notification holds', reason => {
  const ended = {
    reason,
    class: 'limit' as const,
    message: 'What the server says.',
    remedy: ''
  };
  for (const limits of [LIMITS, null]) {
    const text = endText(ended, limits, trans);
    expect(text).not.toBe('');
    expect(text.length).toBeLessThanOrEqual(NOTICE_LENGTH);
  }
});

function event(name: IEvent['event'], more: Partial<IEvent> = {}): IEvent {
  return { event: name, kernel_id: 'k', session: 's', ...more };
}

describe('a notification', () => {
  it('of a death stays, and offers what to do', () => {
    const notice = noticeOf(
      event('ended', { reason: 'OutOfMemory', class: 'limit' }),
      LIMITS,
      null,
      trans
    );
    expect(notice).toEqual({
      message: 'The sandbox ran out of memory (2 GiB). Its variables are gone.',
      type: 'error',
      autoClose: false,
      actions: ['restart', 'receipt']
    });
  });

  it('is not made of an end that was asked for', () => {
    const shutdown = event('ended', { reason: 'Shutdown', class: 'done' });
    expect(noticeOf(shutdown, LIMITS, null, trans)).toBeNull();
  });

  it('names a notebook that is not in front', () => {
    const notice = noticeOf(
      event('deadline', { seconds: 120 }),
      LIMITS,
      'b.ipynb',
      trans
    );
    expect(notice?.message).toBe(
      'b.ipynb: A cell ran longer than 2 min and was interrupted.'
    );
  });

  it('tells how full the memory is', () => {
    const notice = noticeOf(
      event('memory', {
        used_bytes: 1.9 * 1024 ** 3,
        limit_bytes: 2 * 1024 ** 3
      }),
      LIMITS,
      null,
      trans
    );
    expect(notice?.message).toContain('1.9 / 2 GiB');
    expect(notice?.type).toBe('warning');
  });

  it('of a failed start has the reason, and never more than fits', () => {
    const notice = noticeOf(
      event('failed', { message: 'long '.repeat(100) }),
      null,
      'notebook.ipynb',
      trans
    );
    expect(notice?.message.length).toBeLessThanOrEqual(NOTICE_LENGTH);
    expect(notice?.actions).toEqual(['restart']);
  });

  it('is not made of phases and exports', () => {
    for (const name of ['phase', 'ready', 'exported'] as const) {
      expect(noticeOf(event(name), null, null, trans)).toBeNull();
    }
  });
});
