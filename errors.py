"""The one exception for mistakes a user can mend."""


class UserError(Exception):
    """Bad input, in one sentence that names the thing and the remedy.

    Entry points print it without a traceback and exit with status 2; anything else that is raised is a bug and keeps
    its traceback.
    """
