"""`python -m qad.lm_eval run --model hf --model_args pretrained=DIR ...`: lm-eval's own command, which then opens NVFP4 folders.

All that is added is `import qad.hf` before it: lm-eval 0.4 looks for no plug-ins.
"""

import sys

from lm_eval.__main__ import cli_evaluate

import qad.hf  # noqa: F401 - registers its loader

if __name__ == "__main__":
    sys.exit(cli_evaluate())
