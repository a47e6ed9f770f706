/** The side panel: what the notebook in front made, may use, was given, and its receipt. */
import { ITranslator, TranslationBundle } from '@jupyterlab/translation';
import {
  CommandToolbarButton,
  PanelWithToolbar,
  ReactWidget,
  SidePanel,
  UseSignal,
  downloadIcon
} from '@jupyterlab/ui-components';
import type { CommandRegistry } from '@lumino/commands';
import { AccordionPanel } from '@lumino/widgets';
import * as React from 'react';
import { CommandIDs } from './commands';
import { Fact, limitFacts, stageText } from './facts';
import { sandboxIcon } from './icon';
import { hasPreview } from './inert';
import type { SandboxModel } from './model';
import { Facts } from './parts';
import { digestKey } from './receipts';
import { bytes, duration, endText } from './text';
import type { SandboxTracker } from './tracker';
import type { IArtifact, IEndpoint, ISource } from './types';

/** Of the height, by section: the limits are thirteen lines, sources and endpoints mostly one. */
const SHARES = [4, 12, 2, 2, 3];

export interface IPanelOptions {
  tracker: SandboxTracker;
  commands: CommandRegistry;
  translator: ITranslator;
  trans: TranslationBundle;
}

export class SandboxPanel extends SidePanel {
  constructor(private readonly options: IPanelOptions) {
    super({ translator: options.translator });
    const { commands, trans } = options;
    this.id = 'backintel-sandbox-panel';
    this.addClass('jp-SandboxPanel');
    this.title.icon = sandboxIcon;
    this.title.caption = trans.__('Sandbox');
    this.node.setAttribute('role', 'complementary');
    this.node.setAttribute('aria-label', trans.__('Sandbox'));
    this.header.addWidget(
      this.view((model, stage) => (
        <>
          <h2>{model ? model.name : trans.__('Sandbox')}</h2>
          <p role="status">{stage}</p>
        </>
      ))
    );
    const artifacts = this.section(trans.__('Artifacts'), model => (
      <Artifacts model={model} commands={commands} trans={trans} />
    ));
    for (const id of [CommandIDs.refresh, CommandIDs.exportAll]) {
      artifacts.toolbar.addItem(
        id,
        new CommandToolbarButton({ commands, id, label: '' })
      );
    }
    this.section(trans.__('Limits'), model => (
      <Limits model={model} trans={trans} />
    ));
    this.section(trans.__('Sources'), model => (
      <Sources model={model} trans={trans} />
    ));
    this.section(trans.__('Endpoints'), model => (
      <Endpoints model={model} trans={trans} />
    ));
    const receipt = this.section(trans.__('Receipt'), model => (
      <Receipt model={model} trans={trans} />
    ));
    receipt.toolbar.addItem(
      CommandIDs.receipt,
      new CommandToolbarButton({
        commands,
        id: CommandIDs.receipt,
        label: ''
      })
    );
  }

  protected override onAfterShow(): void {
    const { content } = this;
    if (!this.shared && content instanceof AccordionPanel) {
      this.shared = true;
      // Notebook 7 gives it a height only now, and shares of no height are all the same.
      requestAnimationFrame(() => {
        content.setRelativeSizes([...SHARES]);
      });
    }
    this.options.tracker.detailed = true;
  }

  protected override onAfterHide(): void {
    this.options.tracker.detailed = false;
  }

  private shared = false;

  private section(
    label: string,
    render: (model: SandboxModel) => React.JSX.Element
  ): PanelWithToolbar {
    const { trans } = this.options;
    const panel = new PanelWithToolbar();
    panel.addClass('jp-SandboxPanel-section');
    panel.title.label = label;
    // It scrolls, also by keyboard.
    panel.node.tabIndex = 0;
    panel.addWidget(
      this.view(model =>
        model ? (
          render(model)
        ) : (
          <Note>{trans.__('The active notebook has no sandbox.')}</Note>
        )
      )
    );
    this.addWidget(panel);
    return panel;
  }

  private view(
    render: (model: SandboxModel | null, stage: string) => React.JSX.Element
  ): ReactWidget {
    const { tracker, trans } = this.options;
    return ReactWidget.create(
      <UseSignal signal={tracker.changed}>
        {() => {
          const model = tracker.current;
          return render(model, model ? stageText(model.state, trans) : '');
        }}
      </UseSignal>
    );
  }
}

interface ISectionProps {
  model: SandboxModel;
  trans: TranslationBundle;
}

function Note(props: { children: React.ReactNode }): React.JSX.Element {
  return <p className="jp-SandboxPanel-note">{props.children}</p>;
}

function Artifacts(
  props: ISectionProps & { commands: CommandRegistry }
): React.JSX.Element {
  const { model, commands, trans } = props;
  const { state, artifacts, artifactsError, receipt } = model;
  if (state.stage === 'ended' || state.stage === 'gone') {
    return (
      <Note>
        {receipt === null
          ? trans.__('The artifacts ended with the sandbox.')
          : trans.__(
              'The artifacts ended with the sandbox, except what was exported.'
            )}
      </Note>
    );
  }
  if (artifactsError !== null) {
    return <Note>{artifactsError}</Note>;
  }
  if (!artifacts || artifacts.artifacts.length === 0) {
    return <Note>{trans.__('Files saved in /artifacts appear here.')}</Note>;
  }
  return (
    <>
      <ul className="jp-SandboxPanel-list" aria-label={trans.__('Artifacts')}>
        {artifacts.artifacts.map(artifact => (
          <ArtifactRow
            key={artifact.name}
            artifact={artifact}
            digest={model.digests.get(digestKey(artifacts.session, artifact))}
            commands={commands}
            trans={trans}
          />
        ))}
      </ul>
      <Note>
        {trans.__(
          '%1 of %2 used.',
          bytes(artifacts.bytes),
          bytes(artifacts.limit_bytes)
        )}
        {artifacts.truncated ? ` ${trans.__('There are more files.')}` : ''}
      </Note>
    </>
  );
}

function ArtifactRow(props: {
  artifact: IArtifact;
  digest: string | undefined;
  commands: CommandRegistry;
  trans: TranslationBundle;
}): React.JSX.Element {
  const { artifact, commands, digest, trans } = props;
  const { name, refused } = artifact;
  const run = (id: string): void => {
    void commands.execute(id, { name });
  };
  const open = hasPreview(name) ? CommandIDs.preview : CommandIDs.download;
  return (
    <li>
      {refused === null ? (
        <button
          type="button"
          className="jp-SandboxPanel-name"
          title={
            hasPreview(name)
              ? trans.__('Preview %1', name)
              : trans.__('Download %1', name)
          }
          onClick={() => {
            run(open);
          }}
        >
          {name}
        </button>
      ) : (
        <span className="jp-SandboxPanel-name">{name}</span>
      )}
      <span className="jp-SandboxPanel-size">{bytes(artifact.size)}</span>
      {refused === null ? (
        <button
          type="button"
          className="jp-SandboxPanel-icon"
          aria-label={trans.__('Download %1', name)}
          title={trans.__('Download %1', name)}
          onClick={() => {
            run(CommandIDs.download);
          }}
        >
          <downloadIcon.react tag="span" />
        </button>
      ) : null}
      {refused === null ? null : (
        <span className="jp-SandboxPanel-refused">{refused}</span>
      )}
      {digest === undefined ? null : (
        <code title={digest}>sha256 {digest}</code>
      )}
    </li>
  );
}

function Limits(props: ISectionProps): React.JSX.Element {
  const { model, trans } = props;
  const limits = model.state.status?.limits ?? model.plan?.limits;
  const isolation =
    model.state.status?.isolation ?? model.plan?.isolation ?? null;
  return limits ? (
    <Facts facts={limitFacts(limits, isolation, trans)} />
  ) : (
    <Note>{trans.__('Known when the kernel has started.')}</Note>
  );
}

function Sources(props: ISectionProps): React.JSX.Element {
  const { model, trans } = props;
  const sources: ISource[] =
    model.state.status?.sources ?? model.plan?.sources ?? [];
  if (sources.length === 0) {
    return <Note>{trans.__('None. The kernel sees no files of yours.')}</Note>;
  }
  return (
    <>
      <ul className="jp-SandboxPanel-list" aria-label={trans.__('Sources')}>
        {sources.map(source => (
          <li key={source.name}>
            <span className="jp-SandboxPanel-name">{source.guest_path}</span>
            <code title={source.path}>{source.path}</code>
          </li>
        ))}
      </ul>
      <Note>{trans.__('The kernel can read them and change nothing.')}</Note>
    </>
  );
}

function Endpoints(props: ISectionProps): React.JSX.Element {
  const { model, trans } = props;
  const endpoints: IEndpoint[] =
    model.state.status?.endpoints ?? model.plan?.endpoints ?? [];
  if (endpoints.length === 0) {
    return <Note>{trans.__('None. The kernel has no network.')}</Note>;
  }
  return (
    <>
      <Facts
        facts={endpoints.map(endpoint => [
          endpoint.name,
          `${endpoint.host}:${endpoint.port}`
        ])}
      />
      <Note>
        {trans.__('The kernel can connect to them and to no other network.')}
      </Note>
    </>
  );
}

function Receipt(props: ISectionProps): React.JSX.Element {
  const { model, trans } = props;
  const { receipt } = model;
  if (!receipt) {
    return <Note>{trans.__('Written when the kernel has started.')}</Note>;
  }
  const facts: Fact[] = [[trans.__('Session'), receipt.session]];
  if (receipt.image) {
    facts.push([trans.__('Image'), receipt.image.id.slice(0, 19)]);
  }
  if (typeof receipt.peak_memory_bytes === 'number') {
    facts.push([trans.__('Most memory'), bytes(receipt.peak_memory_bytes)]);
  }
  if (typeof receipt.cpu_seconds === 'number') {
    facts.push([trans.__('Computed'), duration(receipt.cpu_seconds)]);
  }
  facts.push([
    trans.__('Ended'),
    receipt.ended
      ? endText(receipt.ended, model.state.status?.limits ?? null, trans)
      : trans.__('not yet')
  ]);
  return <Facts facts={facts} />;
}
