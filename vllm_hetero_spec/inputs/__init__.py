# SPDX-License-Identifier: Apache-2.0
"""What users name - model folders, tokenizers, prompts - read and checked before engines start."""
