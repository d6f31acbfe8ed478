"""The command line, the run, the plan: knows everything, nobody knows it."""

from qad.command.own_packages import exit_where_hidden

exit_where_hidden()  # before anything of them is imported, which the modules here do
