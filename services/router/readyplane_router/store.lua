-- The one script of the Redis store: generic compare-and-take, its release, and leases.
-- It knows nothing of the pairing policy. Expiries are judged by this server's clock alone.
--
-- KEYS (all of one model, one hash tag):
--   1 records  2 epochs  3 leases  4 vitals  5 seats  6 reservations  7 expiries
-- ARGV[1] is the operation, ARGV[2] the change channel, ARGV[3] the model.
local records, epochs, leases, vitals = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local seats, reservations, expiries = KEYS[5], KEYS[6], KEYS[7]
local op, channel, model = ARGV[1], ARGV[2], ARGV[3]

local function now_ms()
  local t = redis.call('TIME')
  return t[1] * 1000 + math.floor(t[2] / 1000)
end

local function told(id)
  redis.call('PUBLISH', channel, cjson.encode({model, id}))
end

-- A seat is fields of one hash: epoch, open, sequences, blocks, its life, and what is used.
-- Its life tells a seat from a later one of the same worker: what was counted on one is counted
-- back there only. A side is [worker, epoch, s, b, w, t, life]; false where not (any more) counted.
local function seat_field(id, name) return id .. '\31' .. name end

local DIMS = {'s', 'b', 'w', 't'}

-- Of a seat: its life and what is used.
local function uses(id)
  return redis.call('HMGET', seats, seat_field(id, 'life'), seat_field(id, 's'), seat_field(id, 'b'),
    seat_field(id, 'w'), seat_field(id, 't'))
end

-- `seat`: as `uses` gives it; kept in step.
local function count(seat, side, sign)
  if seat[1] ~= side[7] then return end
  local out = {}
  for i, dim in ipairs(DIMS) do
    local n = side[2 + i]
    if n ~= 0 then
      local left = (tonumber(seat[1 + i]) or 0) + sign * n
      if left < 0 then left = 0 end
      seat[1 + i] = left
      out[#out + 1] = seat_field(side[1], dim)
      out[#out + 1] = left
    end
  end
  if #out > 0 then redis.call('HSET', seats, unpack(out)) end
end

local function add(side, sign) count(uses(side[1]), side, sign) end

-- Count every side whose seat is there, keep the reservation; returns how many are not there.
local function keep(rid, sides, payload, ttl)
  local missing = 0
  for i, side in ipairs(sides) do
    local seat = redis.call('HMGET', seats, seat_field(side[1], 'epoch'), seat_field(side[1], 'life'))
    if seat[1] == tostring(side[2]) and seat[2] then
      side[7] = seat[2]
      add(side, 1)
    else
      sides[i] = false
      missing = missing + 1
    end
  end
  redis.call('HSET', reservations, rid, cjson.encode({s = sides, p = payload}))
  redis.call('ZADD', expiries, now_ms() + ttl, rid)
  return missing
end

local function release(rid, which)
  local raw = redis.call('HGET', reservations, rid)
  if not raw then return 0 end
  local held = cjson.decode(raw)
  local left = false
  for i, side in ipairs(held.s) do
    if side then
      if which == -1 or which == i - 1 then
        add(side, -1)
        held.s[i] = false
      else
        left = true
      end
    end
  end
  if which == -1 or not left then
    redis.call('HDEL', reservations, rid)
    redis.call('ZREM', expiries, rid)
  else
    redis.call('HSET', reservations, rid, cjson.encode(held))
  end
  return 1
end

local function shut(id)
  if redis.call('HEXISTS', seats, seat_field(id, 'open')) == 1 then
    redis.call('HSET', seats, seat_field(id, 'open'), 0)
  end
end

local function drop_seat(id)
  local all = {}
  for i, name in ipairs({'epoch', 'open', 'max_s', 'max_b', 'life', 's', 'b', 'w', 't'}) do
    all[i] = seat_field(id, name)
  end
  redis.call('HDEL', seats, unpack(all))
end

local ops = {}

-- id, expected lease text ('' for none), new lease text, epoch, ttl_ms, record ('' to keep), fresh
function ops.cas()
  local id, expected, lease, epoch, ttl, record, fresh =
    ARGV[4], ARGV[5], ARGV[6], ARGV[7], tonumber(ARGV[8]), ARGV[9], ARGV[10]
  local found = redis.call('HGET', epochs, 'lease\31' .. id) or ''
  if found ~= expected then return 0 end
  redis.call('HSET', epochs, 'lease\31' .. id, lease, id, epoch)
  redis.call('ZADD', leases, now_ms() + ttl, id)
  if fresh == '1' then
    drop_seat(id)
    redis.call('HDEL', vitals, id)
  end
  if record ~= '' then
    redis.call('HSET', records, id, record)
    told(id)
  end
  return 1
end

-- id, epoch, record
function ops.put()
  if redis.call('HGET', epochs, ARGV[4]) ~= ARGV[5] then return 0 end
  redis.call('HSET', records, ARGV[4], ARGV[6])
  told(ARGV[4])
  return 1
end

-- id, epoch, record: an ended lease has its epoch negated
function ops.finish()
  if redis.call('HGET', epochs, ARGV[4]) ~= ARGV[5] then return 0 end
  redis.call('HSET', epochs, ARGV[4], '-' .. ARGV[5])
  redis.call('ZREM', leases, ARGV[4])
  shut(ARGV[4])
  redis.call('HSET', records, ARGV[4], ARGV[6])
  told(ARGV[4])
  return 1
end

-- id, epoch
function ops.forget()
  if redis.call('HGET', epochs, ARGV[4]) ~= '-' .. ARGV[5] then return 0 end
  redis.call('HDEL', records, ARGV[4])
  redis.call('HDEL', vitals, ARGV[4])
  drop_seat(ARGV[4])
  return 1
end

-- then by fours: id, epoch, ttl_ms, vitals ('' to keep)
function ops.renew()
  local out, now = {}, now_ms()
  for i = 4, #ARGV, 4 do
    local id = ARGV[i]
    local found = redis.call('HGET', epochs, id)
    if not found then
      out[#out + 1] = 'unknown'
    elseif found ~= ARGV[i + 1] then
      out[#out + 1] = 'stale'
    else
      redis.call('ZADD', leases, now + tonumber(ARGV[i + 2]), id)
      if ARGV[i + 3] ~= '' then redis.call('HSET', vitals, id, ARGV[i + 3]) end
      out[#out + 1] = 'ok'
    end
  end
  return out
end

-- limit
function ops.expire()
  local over = redis.call('ZRANGEBYSCORE', leases, '-inf', now_ms(), 'LIMIT', 0, ARGV[4])
  for _, id in ipairs(over) do
    redis.call('ZREM', leases, id)
    local epoch = redis.call('HGET', epochs, id)
    if epoch and string.sub(epoch, 1, 1) ~= '-' then
      redis.call('HSET', epochs, id, '-' .. epoch)
    end
    shut(id)
  end
  return over
end

-- id, epoch, open, sequences, blocks
function ops.seat()
  local id, epoch = ARGV[4], tonumber(ARGV[5])
  local had = redis.call('HGET', seats, seat_field(id, 'epoch'))
  if had and tonumber(had) > epoch then return 0 end
  if not had or tonumber(had) ~= epoch then
    drop_seat(id)
    local t = redis.call('TIME')
    redis.call('HSET', seats, seat_field(id, 'epoch'), ARGV[5],
      seat_field(id, 'life'), t[1] .. '.' .. t[2])
  end
  redis.call('HSET', seats, seat_field(id, 'open'), ARGV[6], seat_field(id, 'max_s'), ARGV[7],
    seat_field(id, 'max_b'), ARGV[8])
  return 1
end

-- Both sides or none: `sides` is JSON, [[id, epoch, s, b, w, t], ...]. Answers what is used after.
local function take(rid, ttl, sides, payload)
  local raw = redis.call('HGET', reservations, rid)
  if raw then return {'held', cjson.decode(raw).p} end
  sides = cjson.decode(sides)
  local why, found = '', {}
  for i, side in ipairs(sides) do
    local id = side[1]
    local limit = redis.call('HMGET', seats, seat_field(id, 'epoch'), seat_field(id, 'open'),
      seat_field(id, 'max_s'), seat_field(id, 'max_b'))
    for j = 1, i - 1 do
      if sides[j][1] == id then found[i] = found[j] end
    end
    local seat = found[i] or uses(id)
    found[i] = seat
    if why ~= '' then
      -- another side refused already; only what is used is told
    elseif not limit[1] then
      why = id .. ': no seat'
    elseif limit[1] ~= tostring(side[2]) then
      why = id .. ': epoch ' .. limit[1] .. ', wanted ' .. tostring(side[2])
    elseif limit[2] ~= '1' then
      why = id .. ': shut'
    elseif (tonumber(seat[2]) or 0) + side[3] > (tonumber(limit[3]) or 0) then
      why = id .. ': no free sequence'
    elseif (tonumber(seat[3]) or 0) + side[4] > (tonumber(limit[4]) or 0) then
      why = id .. ': no free blocks'
    end
    side[7] = seat[1] or nil
  end
  if why == '' then
    for i, side in ipairs(sides) do count(found[i], side, 1) end
    redis.call('HSET', reservations, rid, cjson.encode({s = sides, p = payload}))
    redis.call('ZADD', expiries, now_ms() + ttl, rid)
  end
  local out = {why == '' and 'taken' or 'refused', why}
  for _, seat in ipairs(found) do
    for i = 2, 5 do out[#out + 1] = tonumber(seat[i]) or 0 end
  end
  return out
end

-- Operations one after the other, each for itself: take, rid, ttl_ms, sides, payload; or release,
-- rid, which (-1: all). An answer for each.
function ops.bundle()
  local out, i = {}, 4
  while i <= #ARGV do
    if ARGV[i] == 'take' then
      out[#out + 1] = take(ARGV[i + 1], tonumber(ARGV[i + 2]), ARGV[i + 3], ARGV[i + 4])
      i = i + 5
    else
      out[#out + 1] = 1 - release(ARGV[i + 1], tonumber(ARGV[i + 2]))
      i = i + 3
    end
  end
  return out
end

-- ttl_ms, then by threes: rid, sides, payload. Makes each what its router holds, compared by
-- nobody; done twice it changes nothing. `twin`: placed elsewhere by another router, which stands.
function ops.put_back()
  local ttl, out = tonumber(ARGV[4]), {}
  for i = 5, #ARGV, 3 do
    local rid, sides, payload = ARGV[i], cjson.decode(ARGV[i + 1]), ARGV[i + 2]
    local raw = redis.call('HGET', reservations, rid)
    local held = raw and cjson.decode(raw)
    if held and held.p ~= payload then
      out[#out + 1] = 'twin'
    else
      for _, side in ipairs(held and held.s or {}) do
        if side then add(side, -1) end
      end
      out[#out + 1] = keep(rid, sides, payload, ttl) == 0 and 'put_back' or 'incomplete'
    end
  end
  return out
end

-- rid, side, blocks
function ops.grow()
  local raw = redis.call('HGET', reservations, ARGV[4])
  if not raw then return 0 end
  local held = cjson.decode(raw)
  local side = held.s[tonumber(ARGV[5]) + 1]
  if not side then return 0 end
  local more = {side[1], side[2], 0, tonumber(ARGV[6]), 0, 0, side[7]}
  add(more, 1)
  side[4] = side[4] + more[4]
  redis.call('HSET', reservations, ARGV[4], cjson.encode(held))
  return 1
end

-- ttl_ms, then rids
function ops.extend()
  local till = now_ms() + tonumber(ARGV[4])
  for i = 5, #ARGV do
    if redis.call('HEXISTS', reservations, ARGV[i]) == 1 then
      redis.call('ZADD', expiries, till, ARGV[i])
    end
  end
  return 1
end

-- limit
function ops.sweep()
  local over = redis.call('ZRANGEBYSCORE', expiries, '-inf', now_ms(), 'LIMIT', 0, ARGV[4])
  for _, rid in ipairs(over) do
    release(rid, -1)
    redis.call('ZREM', expiries, rid)
  end
  return over
end

return ops[op]()
