# SPDX-License-Identifier: Apache-2.0
"""A text of many kinds on which two tokenizers are compared when the user names none.

Long enough that shares are good to about a percent, short enough to cost nothing. Blank lines part
it into documents.
"""

from pathlib import Path

CALIBRATION_TEXT = Path(__file__).with_suffix(".txt").read_text(encoding="utf-8")
