/** Small pieces that the status item and the panel share. */
import * as React from 'react';
import type { Fact } from './facts';

/** Pairs of label and value, as one list. */
export function Facts(props: { facts: readonly Fact[] }): React.JSX.Element {
  return (
    <dl className="jp-Sandbox-facts">
      {props.facts.map(([label, value]) => (
        <React.Fragment key={label}>
          <dt>{label}</dt>
          <dd>{value}</dd>
        </React.Fragment>
      ))}
    </dl>
  );
}

/**
 * The time of day in milliseconds, anew each second while `fast`, else each half minute; it stands
 * still while the page is hidden.
 */
export function useNow(fast: boolean): number {
  const [now, setNow] = React.useState(Date.now);
  React.useEffect(() => {
    const tick = (): void => {
      if (!document.hidden) {
        setNow(Date.now());
      }
    };
    tick();
    const timer = setInterval(tick, fast ? 1000 : 30_000);
    document.addEventListener('visibilitychange', tick);
    return () => {
      clearInterval(timer);
      document.removeEventListener('visibilitychange', tick);
    };
  }, [fast]);
  // A parent that renders anew has news, which must not be older than the clock.
  return Math.max(now, Date.now());
}
