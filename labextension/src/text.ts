/** Figures and short texts as people read them; no access to anything. */
import type { TranslationBundle } from '@jupyterlab/translation';
import type { IEnded, ILimits } from './types';

const UNITS = ['B', 'KiB', 'MiB', 'GiB', 'TiB'];
/** Lab cuts a notification's text here. */
export const NOTICE_LENGTH = 139;

/** A size with two or three digits, in steps of 1024: `512 MiB`, `1.5 GiB`. */
export function bytes(value: number): string {
  let unit = 0;
  let scaled = value;
  // Compared as it will be shown: 1023.9 KiB must become 1 MiB and not 1024 KiB.
  while (unit < UNITS.length - 1 && Math.round(scaled) >= 1024) {
    scaled /= 1024;
    unit += 1;
  }
  const digits = unit > 0 && scaled < 10 ? 1 : 0;
  return `${Number(scaled.toFixed(digits))} ${UNITS[unit] ?? ''}`;
}

/** A used amount of a limit, with the unit once where both share it: `0.3 / 2 GiB`. */
export function share(used: number, limit: number): string {
  const [usedText, limitText] = [bytes(used), bytes(limit)];
  const [number, unit] = usedText.split(' ');
  return unit === limitText.split(' ')[1]
    ? `${number ?? ''} / ${limitText}`
    : `${usedText} / ${limitText}`;
}

/** A duration in its two largest units: `42 s`, `3 min 5 s`, `7 h 59 min`. */
export function duration(seconds: number): string {
  const whole = Math.max(0, Math.floor(seconds));
  const [h, m, s] = [
    Math.floor(whole / 3600),
    Math.floor((whole % 3600) / 60),
    whole % 60
  ];
  const parts = h
    ? [`${h} h`, m ? `${m} min` : '']
    : m
      ? [`${m} min`, s ? `${s} s` : '']
      : [`${s} s`];
  return parts.filter(Boolean).join(' ');
}

/** A text that fits a notification, cut at a word. */
export function clip(text: string, length = NOTICE_LENGTH): string {
  const flat = text.replace(/\s+/g, ' ').trim();
  if (flat.length <= length) {
    return flat;
  }
  const cut = flat.slice(0, length - 1);
  const space = cut.lastIndexOf(' ');
  return `${space > length / 2 ? cut.slice(0, space) : cut}…`;
}

/** What a start is doing after the named phase is over. */
export function phaseText(
  phase: string | null,
  trans: TranslationBundle
): string {
  switch (phase) {
    case 'supervisor':
      return trans.__('checking image and sources');
    case 'verified':
      return trans.__('starting the sandbox');
    case 'attested':
    case 'endpoints':
    case 'kernel':
    case 'image':
      return trans.__('starting the kernel');
    case 'ready':
      return trans.__('connecting');
    default:
      return trans.__('preparing');
  }
}

/** The badge of an engine, for a place with little room. */
export function badge(
  isolation: string | null,
  trans: TranslationBundle
): string {
  return isolation?.startsWith('namespaces') === true
    ? trans.__('Weaker isolation')
    : (isolation ?? trans.__('Sandbox'));
}

/** What the server calls the isolation, as a person reads it. */
export function isolationText(
  isolation: string,
  trans: TranslationBundle
): string {
  return isolation.startsWith('namespaces')
    ? trans.__('Weaker isolation (namespaces)')
    : isolation;
}

/** Why a sandbox ended, in one sentence or two. */
export function endText(
  ended: Pick<IEnded, 'reason' | 'message'>,
  limits: ILimits | null,
  trans: TranslationBundle
): string {
  const gone = trans.__('Its variables are gone.');
  switch (ended.reason) {
    case 'Shutdown':
      return trans.__('The sandbox was shut down.');
    case 'ClientGone':
      return goneText(trans);
    case 'OutOfMemory':
      return limits
        ? `${trans.__('The sandbox ran out of memory (%1).', bytes(limits.ram_bytes))} ${gone}`
        : `${trans.__('The sandbox ran out of memory.')} ${gone}`;
    case 'CellDeadlineExceeded':
      return limits
        ? `${trans.__('A cell ran longer than %1 and the sandbox was ended.', duration(limits.cell_deadline_s))} ${gone}`
        : ended.message;
    case 'RunDeadlineExceeded':
      return limits
        ? `${trans.__('The session reached its limit of %1.', duration(limits.run_deadline_s))} ${gone}`
        : ended.message;
    case 'OutputLimitExceeded':
      return `${trans.__('A cell wrote more output than is allowed.')} ${gone}`;
    case 'KernelCrashed':
      return `${trans.__('The kernel crashed.')} ${gone}`;
    default:
      return ended.message || trans.__('The sandbox did not start.');
  }
}

/** Said after a restart of the server. */
export function goneText(trans: TranslationBundle): string {
  return trans.__(
    'The Jupyter server was restarted and the sandbox ended. Its variables are gone.'
  );
}
