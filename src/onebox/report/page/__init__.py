"""The live page: the state of a run or of some machines, in a browser; read-only, on loopback, with nothing from
elsewhere.

:func:`serve_page` serves the files in ``static`` and the state of a source, while somebody looks. Each source is a
module of its own, as not all need the engine: ``live_run`` for a run and for a script's pool in this process,
``recorded_run`` for the folder of a run, ``host_offers`` for agents. A source makes a :class:`PageState`, which is all
that is shown.
"""

from onebox.report.page.page_server import PageServer, PageSource, serve_page
from onebox.report.page.state import PageState

__all__ = ["PageServer", "PageSource", "PageState", "serve_page"]
