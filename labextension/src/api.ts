/**
 * Requests to the server extension (`kernel_provisioner/lab/openapi.yaml`). What it answers is
 * believed as far as Lab believes its server; names and contents of artifacts are the guest's word.
 */
import { URLExt } from '@jupyterlab/coreutils';
import { ServerConnection } from '@jupyterlab/services';
import type { IArtifactList, IExport, IPlan, IReceipt, IStatus } from './types';

/** An answer that is no success. `reason` is for programs, the message for people. */
export class ApiError extends Error {
  constructor(
    readonly status: number,
    readonly reason: string | null,
    message: string
  ) {
    super(message);
  }
}

/** The bytes of an artifact and their digest in hexadecimal, if the server told it. */
export interface IContent {
  blob: Blob;
  sha256: string | null;
}

export class Api {
  constructor(private readonly settings: ServerConnection.ISettings) {}

  status(kernel: string): Promise<IStatus> {
    return this.json(['kernels', kernel]);
  }

  artifacts(kernel: string): Promise<IArtifactList> {
    return this.json(['kernels', kernel, 'artifacts']);
  }

  receipt(kernel: string, session: string | null): Promise<IReceipt> {
    const query: Record<string, string> = session === null ? {} : { session };
    return this.json(['kernels', kernel, 'receipt'], query);
  }

  plan(kernelName: string): Promise<IPlan> {
    return this.json(['sources'], { kernel: kernelName });
  }

  exportAll(kernel: string, directory: string): Promise<IExport> {
    return this.json(['kernels', kernel, 'export'], {}, { directory });
  }

  async artifact(
    kernel: string,
    name: string,
    preview: boolean
  ): Promise<IContent> {
    const path = ['kernels', kernel, 'artifacts', ...name.split('/')];
    const response = await this.request(path, preview ? { preview: '1' } : {});
    const digest = /sha-256=([A-Za-z0-9+/=]+)/.exec(
      response.headers.get('Digest') ?? ''
    );
    return {
      blob: await response.blob(),
      sha256: digest?.[1] === undefined ? null : hexOf(digest[1])
    };
  }

  private async json<T>(
    path: string[],
    query: Record<string, string> = {},
    body?: object
  ): Promise<T> {
    return (await (await this.request(path, query, body)).json()) as T;
  }

  private async request(
    path: string[],
    query: Record<string, string>,
    body?: object
  ): Promise<Response> {
    const url =
      URLExt.join(
        this.settings.baseUrl,
        'backintel/api',
        ...path.map(encodeURIComponent)
      ) + URLExt.objectToQueryString(query);
    const init: RequestInit = body
      ? { method: 'POST', body: JSON.stringify(body) }
      : {};
    const response = await ServerConnection.makeRequest(
      url,
      init,
      this.settings
    );
    if (!response.ok) {
      throw await refusal(response);
    }
    return response;
  }
}

async function refusal(response: Response): Promise<ApiError> {
  try {
    const body = (await response.json()) as {
      message?: string;
      reason?: string | null;
      remedy?: string;
    };
    const message = [body.message, body.remedy].filter(Boolean).join(' ');
    return new ApiError(
      response.status,
      body.reason ?? null,
      message || response.statusText
    );
  } catch {
    return new ApiError(response.status, null, response.statusText);
  }
}

function hexOf(base64: string): string {
  return Array.from(atob(base64), character =>
    character.charCodeAt(0).toString(16).padStart(2, '0')
  ).join('');
}
