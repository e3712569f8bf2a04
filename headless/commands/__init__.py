"""The subcommands of `onediff-guard`."""
