-- weights_unused: return stored weights without a reference, among weights that lost a reference and `args.refs`.
-- Returns the number of checked weights that lost a reference, then the rows of the unused ones.
-- needs: weights_in_use, ages
-- Unused weights, and temporarily used ones (by a load or an expiring checkpoint), are checked again later.
local args, unused = cjson.decode(ARGV[1]), {}
local released = args.prefix .. 'released'

local function is_used_for_a_while(ref)
  for _, user in ipairs(redis.call('SMEMBERS', 'cotrain:weights:' .. ref .. ':users')) do
    local kind, name = string.sub(user, 1, 1), string.sub(user, 3)
    if kind == 'l' or kind == 'c' and redis.call('PTTL', 'cotrain:checkpoint:' .. name) >= 0 then
      return true
    end
  end
  return false
end

local function look_at(ref)
  local row = redis.call('HMGET', 'cotrain:weights:' .. ref, 'record', 'digest', 'size', 'optimizer')
  if not row[2] or row[2] == '' then
    return false -- deleted, or released once they are stored
  end
  if in_use(ref) then
    return is_used_for_a_while(ref)
  end
  unused[#unused + 1] = row
  return true
end

redis.call('ZREM', released, '') -- after a deletion, a full Redis rejects no write of the script
local due = redis.call('ZRANGEBYSCORE', released, '-inf', clock_ms(), 'LIMIT', 0, args.most)
for _, ref in ipairs(due) do
  if look_at(ref) then
    redis.call('ZADD', released, clock_in(args.again_ms), ref)
  else
    redis.call('ZREM', released, ref)
  end
end
for _, ref in ipairs(args.refs) do
  look_at(ref)
end
return { #due, unpack(unused) }
