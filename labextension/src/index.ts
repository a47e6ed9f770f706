import { JupyterFrontEnd, JupyterFrontEndPlugin } from '@jupyterlab/application';
const plugin: JupyterFrontEndPlugin<void> = { id: '@backintel/sandbox:plugin', autoStart: true, activate: (_: JupyterFrontEnd) => { console.log('backintel'); } };
export default plugin;
