"""The gateway's settings: where the router is, who may ask, and the bounds worth changing."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from readyplane.core.work import Slo
from readyplane.kit.settings import ServiceSettings
from readyplane_gateway.bounds import Bounds

DEFAULTS = Bounds()
MEBIBYTE = 1024 * 1024


class GatewaySettings(ServiceSettings):
    """Flags and variables of `python -m readyplane_gateway`."""

    gateway_api_key: str = Field(
        "", repr=False, description="key that clients send as bearer token; empty lets all in"
    )
    pairing: Literal["grpc", "embedded"] = Field(
        "grpc",
        description="who chooses pairs: the router at --router over gRPC, or a replica of it "
        "embedded here, over the same Redis (--redis-url)",
    )
    router_picks: str = Field(
        "",
        description="host:port of the router's --pick-port, several separated by commas: routes and "
        "facts go there, at a fraction of the CPU (pairing grpc; --router is still needed, and is "
        "asked for everything while traces are exported)",
    )
    policy_file: Path | None = Field(
        None, description="router policy as JSON, the same as the routers' (pairing embedded)"
    )
    profiles_dir: Path | None = Field(
        None, description="folder of class profiles, *.json (pairing embedded)"
    )
    tokenizers_dir: Path | None = Field(
        None,
        description="folder with a folder for each model (its name, -- for /) that holds its "
        "tokenizer files: text is tokenised here, as long as the engines agree",
    )
    engine_token: str = Field("", repr=False, description="bearer token that the engines want")
    show_pair: bool = Field(True, description="name workers and reservation in answer headers")
    requests_max: int = Field(DEFAULTS.requests_max, ge=1, description="requests in flight")
    body_mib_max: int = Field(
        DEFAULTS.body_bytes_max // MEBIBYTE, ge=1, le=1024, description="largest request body, MiB"
    )
    prompt_bytes_per_token_max: int = Field(
        DEFAULTS.prompt_bytes_per_token_max,
        ge=1,
        le=4096,
        description="text of more UTF-8 bytes than this x the model's token limit is refused "
        "before an engine tokenises it",
    )
    connections_max: int = Field(
        DEFAULTS.connections_max, ge=1, description="open requests to one worker"
    )
    prefill_slack_s: float = Field(
        DEFAULTS.prefill_slack_s,
        gt=0,
        description="a prefill leg may be so much later than 4x its prediction",
    )
    decode_first_s_max: float = Field(
        DEFAULTS.decode_first_s_max,
        gt=0,
        lt=30,
        description="hand-over to first token; below the KV hold of 30 s",
    )
    decode_idle_s_max: float = Field(
        DEFAULTS.decode_idle_s_max, gt=0, description="silence between two chunks of a stream"
    )
    decode_total_s_max: float = Field(
        DEFAULTS.decode_total_s_max, gt=0, description="an answer that is not streamed"
    )
    client_stall_s_max: float = Field(
        DEFAULTS.client_stall_s_max,
        gt=0,
        description="a client that does not read is cut off after",
    )
    slo_ttft_s: float = Field(
        DEFAULTS.slo.ttft_s, gt=0, description="TTFT target of requests that name none"
    )
    slo_tpot_s: float = Field(
        DEFAULTS.slo.tpot_s, gt=0, description="TPOT target of requests that name none"
    )

    def bounds(self) -> Bounds:
        """The same as the values that the flow works with."""
        return Bounds(
            requests_max=self.requests_max,
            body_bytes_max=self.body_mib_max * MEBIBYTE,
            bodies_bytes_max=max(DEFAULTS.bodies_bytes_max, 2 * self.body_mib_max * MEBIBYTE),
            prompt_bytes_per_token_max=self.prompt_bytes_per_token_max,
            connections_max=self.connections_max,
            prefill_slack_s=self.prefill_slack_s,
            decode_first_s_max=self.decode_first_s_max,
            decode_idle_s_max=self.decode_idle_s_max,
            decode_total_s_max=self.decode_total_s_max,
            client_stall_s_max=self.client_stall_s_max,
            slo=Slo(self.slo_ttft_s, self.slo_tpot_s),
        )
