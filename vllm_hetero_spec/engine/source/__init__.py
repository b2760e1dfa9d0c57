# SPDX-License-Identifier: Apache-2.0
"""Where drafts come from."""
