"""The command ``backintel`` (spec N). Each subcommand imports what it needs when it runs."""
