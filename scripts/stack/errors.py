# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
class StackError(Exception):
    """Bad input or surroundings; the message is the sentence the user reads."""
