# SPDX-License-Identifier: Apache-2.0
"""The text on which two tokenizers are compared if the user names none.

Blank lines separate documents of many kinds. Its length makes shares accurate to about one percent.
"""

from pathlib import Path

CALIBRATION_TEXT = Path(__file__).with_suffix(".txt").read_text(encoding="utf-8")
