/** The status item: engine, memory, the running cell's clock, time left; a popup tells the rest. */
import { Popup, showPopup } from '@jupyterlab/statusbar';
import type { TranslationBundle } from '@jupyterlab/translation';
import { ReactWidget, UseSignal } from '@jupyterlab/ui-components';
import * as React from 'react';
import {
  cellText,
  liveFacts,
  limitFacts,
  memoryText,
  stageText
} from './facts';
import { sandboxIcon } from './icon';
import { Facts, useNow } from './parts';
import { ISandbox, cellClock, isMemoryFull, runLeft } from './state';
import { badge, duration, isolationText } from './text';
import type { SandboxTracker } from './tracker';

export class SandboxStatus extends ReactWidget {
  constructor(
    private readonly tracker: SandboxTracker,
    private readonly trans: TranslationBundle,
    private readonly openPanel: () => void
  ) {
    super();
    this.addClass('jp-SandboxStatus');
    this.addClass('jp-mod-highlighted');
  }

  protected override render(): React.JSX.Element {
    return (
      <UseSignal signal={this.tracker.changed}>
        {() => {
          const model = this.tracker.current;
          return model ? (
            <StatusItem
              state={model.state}
              trans={this.trans}
              onOpen={() => {
                this.toggle();
              }}
            />
          ) : null;
        }}
      </UseSignal>
    );
  }

  private toggle(): void {
    if (this.popup && !this.popup.isDisposed) {
      this.popup.dispose();
      return;
    }
    const body = new SandboxDetails(this.tracker, this.trans, () => {
      this.popup?.dispose();
      this.openPanel();
    });
    this.popup = showPopup({
      body,
      anchor: this,
      align: 'left',
      hasDynamicSize: true
    });
    body.disposed.connect(() => {
      // Escape returns to where one was; a click elsewhere has its own focus.
      if (
        document.activeElement === document.body ||
        document.activeElement === null
      ) {
        this.node.querySelector('button')?.focus();
      }
    });
  }

  private popup: Popup | null = null;
}

function StatusItem(props: {
  state: ISandbox;
  trans: TranslationBundle;
  onOpen: () => void;
}): React.JSX.Element {
  const { state, trans } = props;
  const now = useNow(cellClock(state, Date.now()) !== null);
  const cell = cellClock(state, now);
  const left = runLeft(state, now);
  const memory = state.status?.memory;
  const parts: [name: string, text: string, warn: boolean][] = [];
  if (state.stage === 'running') {
    parts.push(['badge', badge(state.status?.isolation ?? null, trans), false]);
    if (memory) {
      parts.push(['memory', memoryText(state), isMemoryFull(state)]);
    }
    if (cell) {
      parts.push(['cell', trans.__('Cell %1', cellText(cell, trans)), false]);
    }
    if (left !== null) {
      parts.push(['left', trans.__('%1 left', duration(left)), left < 60]);
    }
    parts.push(['network', trans.__('Offline'), false]);
  } else {
    const text = {
      starting: stageText(state, trans),
      ended: trans.__('Sandbox ended'),
      gone: trans.__('Sandbox ended'),
      none: trans.__('Sandbox not started')
    }[state.stage];
    parts.push([
      'stage',
      text,
      state.stage === 'ended' || state.stage === 'gone'
    ]);
  }
  const spoken = parts.map(([, text]) => text).join(', ');
  return (
    <button
      type="button"
      aria-haspopup="dialog"
      aria-label={trans.__('Sandbox: %1', spoken)}
      title={title(state, now, trans)}
      onClick={props.onOpen}
    >
      <sandboxIcon.react tag="span" className="jp-SandboxStatus-icon" />
      {parts.map(([name, text, warn]) => (
        <span
          key={name}
          data-part={name}
          className={warn ? 'jp-mod-warn' : undefined}
        >
          {text}
        </span>
      ))}
    </button>
  );
}

function title(state: ISandbox, now: number, trans: TranslationBundle): string {
  const facts = liveFacts(state, now, trans).map(
    ([label, value]) => `${label}: ${value}`
  );
  const isolation = state.status?.isolation;
  return [
    stageText(state, trans),
    ...(isolation
      ? [trans.__('Isolation: %1', isolationText(isolation, trans))]
      : []),
    ...facts,
    trans.__('Network: off')
  ].join('\n');
}

/** What the popup shows. */
class SandboxDetails extends ReactWidget {
  constructor(
    private readonly tracker: SandboxTracker,
    private readonly trans: TranslationBundle,
    private readonly openPanel: () => void
  ) {
    super();
    this.addClass('jp-SandboxDetails');
    this.node.setAttribute('role', 'dialog');
    this.node.setAttribute('aria-label', trans.__('Sandbox'));
    this.node.tabIndex = -1;
  }

  protected override onAfterAttach(): void {
    this.update();
    this.node.focus();
  }

  protected override render(): React.JSX.Element {
    return (
      <UseSignal signal={this.tracker.changed}>
        {() => {
          const model = this.tracker.current;
          return model ? (
            <>
              <DetailFacts state={model.state} trans={this.trans} />
              <button
                type="button"
                className="jp-mod-styled jp-mod-minimal"
                onClick={this.openPanel}
              >
                {this.trans.__('Open the sandbox panel')}
              </button>
            </>
          ) : null;
        }}
      </UseSignal>
    );
  }
}

function DetailFacts(props: {
  state: ISandbox;
  trans: TranslationBundle;
}): React.JSX.Element {
  const { state, trans } = props;
  const now = useNow(cellClock(state, Date.now()) !== null);
  const limits = state.status?.limits;
  const live = liveFacts(state, now, trans);
  // The memory in use says the limit already.
  const lasting = limits
    ? limitFacts(limits, state.status.isolation, trans).slice(0, 3)
    : [];
  return (
    <>
      <p className="jp-SandboxDetails-stage">{stageText(state, trans)}</p>
      <Facts facts={[...live, ...lasting]} />
    </>
  );
}
