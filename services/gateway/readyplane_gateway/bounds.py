"""The bounds of the gateway: every wait, queue and size, each with its unit in its name.

Owned here so that the flow, the legs and the tests speak of the same numbers; `__main__` fills
them from settings.
"""

from __future__ import annotations

from dataclasses import dataclass

from readyplane.core.work import Slo

DEFAULT_SLO = Slo(ttft_s=2.0, tpot_s=0.1)


@dataclass(frozen=True, slots=True)
class Bounds:
    """What the gateway allows and how long it waits.

    Attributes:
        requests_max: requests in flight; the next one is refused with 429.
        body_bytes_max: one request body; a modelled engine takes no more either.
        bodies_bytes_max: all bodies in flight together.
        prompt_bytes_per_token_max: text with more UTF-8 bytes than this times the model's limit in
            tokens is refused unread: no engine is asked to tokenise what cannot fit.
        header_bytes_max: all headers of one request.
        body_s_max: a client sends its body within this.
        client_stall_s_max: a client takes a chunk within this, else it counts as gone.
        connections_max: open requests to one worker; the next leg finds it busy.
        connect_s_max: TCP connect to an engine.
        prefill_factor, prefill_slack_s: a prefill leg may take predicted TTFT x factor + slack.
        decode_first_s_max: hand-over to first byte of a decode leg. Below the 30 s for which a
            prefill engine holds the KV, so that no decode engine reads what was freed (B67).
        decode_idle_s_max: silence between two chunks of a decode leg.
        decode_total_s_max: an answer that is not streamed.
        tokenize_s_max: one call of `/tokenize`.
        router_wait_s_max: how long a request waits for a router that does not answer.
        route_grace_s: after a client has left, how long an answer of the router is waited for
            before the call is cancelled.
        progress_tokens: a PROGRESS event after so many tokens (and every few seconds anyway).
        move_after_s: a request on a worker that drains is moved when it has not ended by then.
        slo: judged where the request names none.
    """

    requests_max: int = 4096
    body_bytes_max: int = 32 * 1024 * 1024
    bodies_bytes_max: int = 512 * 1024 * 1024
    prompt_bytes_per_token_max: int = 16
    header_bytes_max: int = 32 * 1024
    body_s_max: float = 60.0
    client_stall_s_max: float = 60.0
    connections_max: int = 512
    connect_s_max: float = 2.0
    prefill_factor: float = 4.0
    prefill_slack_s: float = 10.0
    decode_first_s_max: float = 25.0
    decode_idle_s_max: float = 30.0
    decode_total_s_max: float = 600.0
    tokenize_s_max: float = 5.0
    router_wait_s_max: float = 5.0
    route_grace_s: float = 1.0
    progress_tokens: int = 256
    move_after_s: float = 2.0
    slo: Slo = DEFAULT_SLO
