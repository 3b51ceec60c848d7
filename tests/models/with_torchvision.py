"""torchvision next to a torch for which it was not built: its operators are missing, what processors use is not."""

import contextlib

from torch import library as operators


def import_torchvision():
    """Import torchvision although its compiled operators are missing."""
    library = operators.Library("torchvision", "DEF")
    register_fake = operators.register_fake

    def forgiving(*args, **kwargs):
        with contextlib.suppress(RuntimeError):
            decorate = register_fake(*args, **kwargs)
            return lambda function: suppressed(decorate, function)
        return lambda function: function

    def suppressed(decorate, function):
        with contextlib.suppress(RuntimeError):
            return decorate(function)
        return function

    operators.register_fake = forgiving
    try:
        import torchvision  # noqa: F401  # for what importing it registers
    finally:
        operators.register_fake = register_fake
    return library
