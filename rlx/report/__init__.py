"""Reports: a page of one HTML file that shows a program from its graph to its assembly, and where its time goes.

Stage between the backends and the runtime. `Source` is what is known of a program, `data` makes plain data of it, and
`page` puts the data into the page. Who has a program (`rlx.compiler.inspection`, `rlx.cli.report`) makes the source.
"""

from typing import TYPE_CHECKING

from rlx.lazy import modules_of

if TYPE_CHECKING:
    from rlx.report import page

__all__ = ["page"]

# Imported when the first report is made.
__getattr__ = modules_of(__name__, __all__)
