/** Pairs of label and value for the popup and the panel. Pure. */
import type { TranslationBundle } from '@jupyterlab/translation';
import { ISandbox, cellClock, runLeft } from './state';
import {
  badge,
  bytes,
  duration,
  endText,
  goneText,
  isolationText,
  phaseText,
  share
} from './text';
import type { ILimits } from './types';

export type Fact = readonly [label: string, value: string];

/** One line on what the sandbox is doing. */
export function stageText(state: ISandbox, trans: TranslationBundle): string {
  switch (state.stage) {
    case 'starting':
      return trans.__('Starting: %1', phaseText(state.phase, trans));
    case 'running':
      return state.busySince === null ? trans.__('Idle') : trans.__('Working');
    case 'ended':
      return state.ended
        ? endText(state.ended, state.status?.limits ?? null, trans)
        : trans.__('Ended');
    case 'gone':
      return goneText(trans);
    case 'none':
      return trans.__('Not started');
  }
}

/** What changes while it runs. */
export function liveFacts(
  state: ISandbox,
  now: number,
  trans: TranslationBundle
): Fact[] {
  const { status } = state;
  if (state.stage !== 'running' || !status) {
    return [];
  }
  const facts: Fact[] = [];
  if (status.memory) {
    facts.push([trans.__('Memory'), memoryText(state)]);
    facts.push([trans.__('Most memory'), bytes(status.memory.peak_bytes)]);
  }
  const cell = cellClock(state, now);
  if (cell) {
    facts.push([trans.__('This cell'), cellText(cell, trans)]);
  }
  const left = runLeft(state, now);
  if (left !== null) {
    facts.push([trans.__('Time left'), duration(left)]);
  }
  if (status.cells) {
    const { count, limit } = status.cells;
    facts.push([
      trans.__('Cells run'),
      limit === null ? `${count}` : trans.__('%1 of %2', count, limit)
    ]);
  }
  return facts;
}

/** Memory used, of the limit. */
export function memoryText(state: ISandbox): string {
  const memory = state.status?.memory;
  return memory ? share(memory.used_bytes, memory.limit_bytes) : '';
}

/** A cell's clock against its deadline. */
export function cellText(
  cell: { elapsed: number; deadline: number | null; paused: boolean },
  trans: TranslationBundle
): string {
  if (cell.paused) {
    return trans.__('waiting for input');
  }
  const elapsed = duration(cell.elapsed);
  return cell.deadline === null
    ? elapsed
    : `${elapsed} / ${duration(cell.deadline)}`;
}

/** What the sandbox may use. */
export function limitFacts(
  limits: ILimits,
  isolation: string | null,
  trans: TranslationBundle
): Fact[] {
  const late =
    limits.on_cell_deadline === 'interrupt'
      ? trans.__('then interrupted')
      : trans.__('then ended');
  return [
    [
      trans.__('Isolation'),
      isolation === null ? badge(null, trans) : isolationText(isolation, trans)
    ],
    [trans.__('Network'), trans.__('off')],
    [trans.__('Profile'), limits.name],
    [trans.__('Memory'), bytes(limits.ram_bytes)],
    [trans.__('Processors'), `${limits.cpus}`],
    [trans.__('A cell'), `${duration(limits.cell_deadline_s)}, ${late}`],
    [trans.__('The session'), duration(limits.run_deadline_s)],
    [
      trans.__('Cells'),
      limits.cells === null ? trans.__('no limit') : `${limits.cells}`
    ],
    ['/workspace', bytes(limits.workspace_bytes)],
    ['/artifacts', bytes(limits.artifacts_bytes)],
    ['/tmp', bytes(limits.temp_bytes)],
    [trans.__('Processes'), `${limits.tasks}`],
    [trans.__('Open files'), `${limits.open_files}`]
  ];
}
