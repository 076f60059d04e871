"""Shell completion: click's, and names of files where click has nothing to offer."""

from __future__ import annotations

from click import shell_completion
from click.shell_completion import CompletionItem


class _Files(shell_completion.ShellComplete):
    """Most arguments of tokshard are paths or URIs. For click they are text, which it does not complete."""

    def get_completions(self, args: list[str], incomplete: str) -> list[CompletionItem]:
        return super().get_completions(args, incomplete) or [CompletionItem(incomplete, type="file")]


def complete_files() -> None:
    """Let the shells complete names of files, too."""
    for shell in (shell_completion.BashComplete, shell_completion.ZshComplete, shell_completion.FishComplete):
        shell_completion.add_completion_class(type(shell.__name__, (_Files, shell), {}))
