/** Which notification an event deserves. Pure: events in, texts out. */
import type { TranslationBundle } from '@jupyterlab/translation';
import type { IEvent, ILimits } from './types';
import { clip, duration, endText, share } from './text';

export interface INotice {
  readonly message: string;
  readonly type: 'error' | 'warning';
  /** Milliseconds, or false to stay until it is closed. */
  readonly autoClose: number | false;
  readonly actions: readonly ('restart' | 'receipt')[];
  /** It is true only as long as the sandbox runs. */
  readonly until?: 'end';
}

const WARNING_MS = 20_000;

/**
 * The notification for an event, or null where none is due.
 *
 * `notebook` names the notebook if it is not the one in front.
 */
export function noticeOf(
  event: IEvent,
  limits: ILimits | null,
  notebook: string | null,
  trans: TranslationBundle
): INotice | null {
  const named = (text: string): string =>
    clip(notebook === null ? text : `${notebook}: ${text}`);
  switch (event.event) {
    case 'memory':
      return {
        message: named(
          trans.__(
            'Memory is almost used up: %1. At the limit the kernel ends.',
            share(event.used_bytes ?? 0, event.limit_bytes ?? 0)
          )
        ),
        type: 'warning',
        autoClose: WARNING_MS,
        actions: [],
        until: 'end'
      };
    case 'deadline':
      return {
        message: named(
          trans.__(
            'A cell ran longer than %1 and was interrupted.',
            duration(event.seconds ?? 0)
          )
        ),
        type: 'warning',
        autoClose: WARNING_MS,
        actions: []
      };
    case 'failed':
      return {
        message: named(event.message ?? trans.__('The sandbox did not start.')),
        type: 'error',
        autoClose: false,
        actions: ['restart']
      };
    case 'ended': {
      // The person asked for this end.
      if (event.class === 'done') {
        return null;
      }
      const ended = {
        reason: event.reason ?? '',
        class: event.class ?? 'infrastructure',
        message: event.message ?? '',
        remedy: event.remedy ?? ''
      };
      return {
        message: named(endText(ended, limits, trans)),
        type: 'error',
        autoClose: false,
        actions: ['restart', 'receipt']
      };
    }
    default:
      return null;
  }
}
