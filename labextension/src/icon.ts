import { LabIcon } from '@jupyterlab/ui-components';

/** The product's mark in Lab's one-colour style: three bars in a frame of corners. */
export const sandboxIcon = new LabIcon({
  name: 'backintel:sandbox',
  svgstr: `<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 24 24" width="16">
<g class="jp-icon3 jp-icon-selectable" fill="#616161">
<path d="M3 9V5a2 2 0 0 1 2-2h4v2H5v4zM15 3h4a2 2 0 0 1 2 2v4h-2V5h-4zM21 15v4a2 2 0 0 1-2 2h-4v-2h4v-4zM9 21H5a2 2 0 0 1-2-2v-4h2v4h4z"/>
<path d="M7 13h2.6v4H7zM10.7 10h2.6v7h-2.6zM14.4 7H17v10h-2.6z"/>
</g></svg>`
});
