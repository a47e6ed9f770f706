"""jupyter_kernel_test, the conformance suite that Jupyter's kernel authors use, on our kernel.

Every sample that it knows is given, since it skips what it has no sample for.
"""

from __future__ import annotations

import jupyter_kernel_test
import pytest

pytestmark = [
    pytest.mark.sandbox,
    pytest.mark.usefixtures("installed_kernel"),
    pytest.mark.may_skip("History range not supported"),
    # The suite closes no sockets and calls what jupyter_client deprecates.
    pytest.mark.filterwarnings("default"),
]


class TestConformance(jupyter_kernel_test.KernelTests):
    kernel_name = "backintel-sandbox"
    language_name = "python"
    file_extension = ".py"
    code_hello_world = "print('hello, world')"
    code_stderr = "import sys; print('test', file=sys.stderr)"
    completion_samples = [{"text": "zi", "matches": {"zip"}}]  # noqa: RUF012 - the suite's form
    complete_code_samples = ["1", "print('hello, world')", "def f(x):\n  return x*2\n\n\n"]  # noqa: RUF012
    incomplete_code_samples = ["print('''hello", "def f(x):\n  x*2"]  # noqa: RUF012
    invalid_code_samples = ["import = 7q"]  # noqa: RUF012
    code_page_something = "zip?"
    code_generate_error = "raise"
    code_execute_result = [  # noqa: RUF012
        {"code": "1+2+3", "result": "6"},
        {"code": "[n*n for n in range(1, 4)]", "result": "[1, 4, 9]"},
    ]
    code_display_data = [  # noqa: RUF012
        {
            "code": "from IPython.display import HTML, display; display(HTML('<b>x</b>'))",
            "mime": "text/html",
        }
    ]
    code_history_pattern = "1?2*"
    # As jupyter_kernel_test's own run of ipykernel has it: ipykernel answers `range` for the
    # current session with session number 0, in a sandbox or not.
    supported_history_operations = ("tail", "search")
    code_inspect_sample = "zip"
    code_clear_output = "from IPython.display import clear_output; clear_output()"
