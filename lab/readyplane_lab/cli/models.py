"""Whether a model that was named is one that the system knows: an unknown one is no empty answer.

Owned by the commands that list or ask for one model.
"""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING

from readyplane.core.errors import NotFound, ReadyplaneError

if TYPE_CHECKING:
    from readyplane.client import RouterClient


async def check_known(router: RouterClient, model: str) -> None:
    """Return where some worker or the registry has the model, or where nobody can say.

    The router is asked as for a request, in a dry run: it knows both.

    Raises:
        NotFound: nobody has it; those that are served are named.
    """
    from readyplane.core.work import RequestShape

    try:
        await router.route(
            RequestShape(request_id=f"cli-{secrets.token_hex(6)}", model=model, isl=1),
            dry_run=True,
        )
    except NotFound as error:
        served = sorted({w.offer.model for w in (await router.list_workers()).workers.values()})
        told = f"served are {', '.join(served)}" if served else "no worker serves one"
        raise NotFound("model", model, f"{told}; see `readyplane artifact list`") from error
    except ReadyplaneError:
        return  # no pair, no room, a store that is away: none of it says that it is unknown
