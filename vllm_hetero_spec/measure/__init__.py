# SPDX-License-Identifier: Apache-2.0
"""Engines that can be measured, and what is measured of them."""
