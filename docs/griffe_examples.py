"""Extension of griffe: a docstring's section "Example:" is shown as code, like the section "Examples:"."""

from typing import Any

import griffe


class ExampleSections(griffe.Extension):
    """Rename the section in every docstring. griffe knows only the plural."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = obj.docstring.value.replace("\nExample:\n", "\nExamples:\n")
