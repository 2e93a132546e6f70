# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""What the demo, the end-to-end tests and the benchmarks have in common."""
