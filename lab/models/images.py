"""Images in a sequence, for the one kind of model here that reads them (LFM3-VL)."""

from __future__ import annotations

import numpy as np
import torch

from lab.models.cache import first_line
from lab.support.errors import BadInput


class Images:
    """Which positions of a decoder's sequence show an image, and the rows that stand there.

    processor: transformers' image processor of the model, None where there is none.
    """

    def __init__(self, decoder, processor=None):
        self.decoder, self.processor = decoder, processor
        self._rows: dict[int, torch.Tensor] = {}                 # {position: the row (d,) that stands there}

    @property
    def _token(self) -> int | None:
        return getattr(self.decoder.model.config, "image_token_id", None)

    @torch.inference_mode()
    def see(self, path) -> torch.Tensor:
        """The rows (n, d) that stand for the n image tokens of this file, by the model's own vision part.

        BadInput for a file that is no image, and for a model that reads none: the lab gives images to LFM3-VL, whose
        image tokens have the positions of any other.
        """
        decoder, model = self.decoder, self.decoder.model
        if model.config.model_type != "lfm3_vl":
            raise BadInput(f"{decoder.name} reads text only, so it cannot see {path}: an LFM3-VL model would be right")
        if self.processor is None:
            raise BadInput(f"{decoder.name} has no image processor that transformers loads: its folder lacks "
                           f"preprocessor_config.json, or it is damaged")
        from PIL import Image, ImageOps
        try:
            with Image.open(path) as file:
                image = ImageOps.exif_transpose(file).convert("RGB")
            inputs = self.processor(images=[image], return_tensors="pt")
        except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
            raise BadInput(f'"{path}" cannot be read as an image: {first_line(error)}') from error
        found = model.get_image_features(inputs["pixel_values"].to(decoder.device, decoder.dtype),
                                         inputs["image_grid_thw"].to(decoder.device), return_dict=True)
        return torch.cat(tuple(found.pooler_output)).to(decoder.dtype)

    def show(self, tokens, images=(), at: int = 0) -> list[int]:
        """Place images in the sequence -> the ids that shall stand from position `at` on.

        tokens: ids with one image token for each of `images`, the rows (n, d) of `see`; n such tokens take its place.
        From then on a forward over these positions reads the rows. Images placed at `at` or later before are forgotten,
        and so is what the cache holds from there on. BadInput, and nothing is changed, for more images than places.
        """
        decoder, tokens = self.decoder, [int(token) for token in tokens]
        if len(images) > tokens.count(self._token):
            raise BadInput(f"{decoder.name}: {len(images)} images were given and the text has a place for "
                           f"{tokens.count(self._token)}: as many image tokens would be right")
        if at < decoder.length:
            decoder.rewind(at if at >= decoder.rewind_floor else 0)
        self._rows = {position: row for position, row in self._rows.items() if position < at}
        left = list(images)
        out: list[int] = []
        for token in tokens:
            rows = left.pop(0) if left and token == self._token else [None]
            for row in rows:
                if row is not None:
                    self._rows[at + len(out)] = row
                out.append(token)
        return out

    @torch.inference_mode()
    def embeddings(self, ids: np.ndarray, positions: np.ndarray) -> dict:
        """What a forward over ids (B, n) at positions (B, n) is sent instead of them where images stand: embeddings."""
        at = [] if not self._rows else [
            place for place in zip(*np.nonzero(ids == self._token)) if int(positions[place]) in self._rows]
        if not at:
            return {}
        rows = self.decoder.model.get_input_embeddings()(torch.from_numpy(ids).to(self.decoder.device))
        for place in at:
            rows[place] = self._rows[int(positions[place])]
        return {"inputs_embeds": rows}
