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

local function add(side, sign)
  local id, out = side[1], {}
  local seat = redis.call('HMGET', seats, seat_field(id, 'life'), seat_field(id, 's'),
    seat_field(id, 'b'), seat_field(id, 'w'), seat_field(id, 't'))
  if not seat[1] or seat[1] ~= side[7] then return end
  for i, dim in ipairs(DIMS) do
    if side[2 + i] ~= 0 then
      out[#out + 1] = seat_field(id, dim)
      out[#out + 1] = math.max(0, (tonumber(seat[1 + i]) or 0) + sign * side[2 + i])
    end
  end
  if #out > 0 then redis.call('HSET', seats, unpack(out)) end
end

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

-- Operations one after the other, each for itself: take, rid, ttl_ms, sides (JSON: [[id, epoch, s, b,
-- w, t], ...]), payload; or release, rid, which (-1: all). An answer for each: of a take {`taken`,
-- `held` or `refused`, why or payload, what is used on each side after}; of a release 1 for unknown.
-- Each seat and reservation is read once, and written once at the end.
function ops.bundle()
  local seat_of, held_of, gone = {}, {}, {}

  -- epoch, open, max_s, max_b, life, s, b, w, t
  local function seat(id)
    local found = seat_of[id]
    if not found then
      local p = id .. '\31'
      found = redis.call('HMGET', seats, p .. 'epoch', p .. 'open', p .. 'max_s', p .. 'max_b',
        p .. 'life', p .. 's', p .. 'b', p .. 'w', p .. 't')
      for _, i in ipairs({3, 4, 6, 7, 8, 9}) do found[i] = tonumber(found[i]) or 0 end
      seat_of[id] = found
    end
    return found
  end

  local function counted(side, sign)
    local found = seat(side[1])
    if not found[5] or found[5] ~= side[7] then return end
    for i = 3, 6 do
      if side[i] ~= 0 then
        found[3 + i] = math.max(0, found[3 + i] + sign * side[i])
        found.changed = true
      end
    end
  end

  local function held(rid)
    local found = held_of[rid]
    if found == nil then
      local raw = redis.call('HGET', reservations, rid)
      found = raw and cjson.decode(raw)
      held_of[rid] = found
    end
    return found
  end

  local function refusal(side)
    local id, found = side[1], seat(side[1])
    if not found[1] then return id .. ': no seat' end
    if found[1] ~= tostring(side[2]) then
      return id .. ': epoch ' .. found[1] .. ', wanted ' .. tostring(side[2])
    end
    if found[2] ~= '1' then return id .. ': shut' end
    if found[6] + side[3] > found[3] then return id .. ': no free sequence' end
    if found[7] + side[4] > found[4] then return id .. ': no free blocks' end
  end

  local function take(rid, ttl, sides, payload)
    local before = held(rid)
    if before then return {'held', before.p} end
    sides = cjson.decode(sides)
    local why
    for _, side in ipairs(sides) do
      why = why or refusal(side)
      side[7] = seat(side[1])[5] or nil
    end
    if not why then
      for _, side in ipairs(sides) do counted(side, 1) end
      held_of[rid] = {s = sides, p = payload, changed = true, ttl = ttl}
    end
    local out = {why and 'refused' or 'taken', why or ''}
    for _, side in ipairs(sides) do
      local found = seat(side[1])
      for i = 6, 9 do out[#out + 1] = found[i] end
    end
    return out
  end

  local function given_back(rid, which)
    local found = held(rid)
    if not found then return 1 end
    local left = false
    for i, side in ipairs(found.s) do
      if side and (which == -1 or which == i - 1) then
        counted(side, -1)
        found.s[i] = false
      elseif side then
        left = true
      end
    end
    found.changed = true
    if which == -1 or not left then
      held_of[rid], gone[rid] = false, true
    end
    return 0
  end

  local out, i = {}, 4
  while i <= #ARGV do
    if ARGV[i] == 'take' then
      out[#out + 1] = take(ARGV[i + 1], tonumber(ARGV[i + 2]), ARGV[i + 3], ARGV[i + 4])
      i = i + 5
    else
      out[#out + 1] = given_back(ARGV[i + 1], tonumber(ARGV[i + 2]))
      i = i + 3
    end
  end

  local use, kept, due, ended, now = {}, {}, {}, {}, now_ms()
  for id, found in pairs(seat_of) do
    if found.changed then
      for n, dim in ipairs(DIMS) do
        use[#use + 1] = seat_field(id, dim)
        use[#use + 1] = found[5 + n]
      end
    end
  end
  for rid, found in pairs(held_of) do
    if found and found.changed then
      kept[#kept + 1] = rid
      kept[#kept + 1] = cjson.encode({s = found.s, p = found.p})
      if found.ttl then
        due[#due + 1] = now + found.ttl
        due[#due + 1] = rid
      end
    elseif gone[rid] and not found then
      ended[#ended + 1] = rid
    end
  end
  if #use > 0 then redis.call('HSET', seats, unpack(use)) end
  if #kept > 0 then redis.call('HSET', reservations, unpack(kept)) end
  if #due > 0 then redis.call('ZADD', expiries, unpack(due)) end
  if #ended > 0 then
    redis.call('HDEL', reservations, unpack(ended))
    redis.call('ZREM', expiries, unpack(ended))
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

-- rids; answers those that are not there
function ops.missing()
  local out = {}
  for i = 4, #ARGV do
    if redis.call('HEXISTS', reservations, ARGV[i]) == 0 then out[#out + 1] = ARGV[i] end
  end
  return out
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
