# SPDX-License-Identifier: Apache-2.0
"""Reading and checking the models, tokenizers and prompts that users name, before engines start."""
