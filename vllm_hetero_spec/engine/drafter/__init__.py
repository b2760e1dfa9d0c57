# SPDX-License-Identifier: Apache-2.0
"""The drafter: its model, KV pool, requests, and the decode loop."""
