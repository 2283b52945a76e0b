"""input.prompt_template: a Jinja template over a row's columns, in a sandbox.

The template is the config's and the columns are data: a column's text is never run as a template. The sandbox refuses
attributes that lead out of the values, and ranges beyond 100,000. What draws at random is left out: a row must give the
same prompt in every start.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from jinja2 import StrictUndefined, TemplateError, TemplateSyntaxError, meta
from jinja2.sandbox import ImmutableSandboxedEnvironment

from pipeline.errors import RowError, RowErrorType

_SHOWN_CHARS = 200


class PromptTemplate:
    """A compiled template. `columns`: the names that it reads, sorted."""

    def __init__(self, source: str) -> None:
        """Raises ValueError saying what is wrong with the template."""
        environment = _environment()
        try:
            parsed = environment.parse(source)
            self._template = environment.from_string(source)
        except TemplateError as error:
            line = f"line {error.lineno}: " if isinstance(error, TemplateSyntaxError) else ""
            raise ValueError(f"not a valid Jinja template: {line}{error.message}") from error
        if list(meta.find_referenced_templates(parsed)):
            raise ValueError("a prompt template cannot include, import or extend others; write it out")
        self.columns = sorted(meta.find_undeclared_variables(parsed) - set(environment.globals))
        if not self.columns:
            raise ValueError("it reads no column, so every row would have the same prompt; write {{ column }}")

    def render(self, values: Mapping[str, Any]) -> str:
        """The prompt. `values` holds all of `columns`. Raises RowError."""
        try:
            return self._template.render(values)
        except Exception as error:  # filters and operators raise what they like over one row's values
            raise RowError(
                RowErrorType.TEMPLATE,
                f"input.prompt_template failed: {type(error).__name__}",
                detail=f": {str(error)[:_SHOWN_CHARS]}",
            ) from error


@lru_cache(maxsize=8)
def compiled(source: str) -> PromptTemplate:
    """The template, compiled once a process."""
    return PromptTemplate(source)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(undefined=StrictUndefined)
    del environment.globals["lipsum"], environment.filters["random"]
    return environment
