# SPDX-License-Identifier: Apache-2.0
"""How figures are written and put in tables: the same in every command and file."""
